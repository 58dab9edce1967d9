"""What `warmroute replica` can be told."""

from __future__ import annotations

from dataclasses import dataclass

from shared.settings_fields import (
    HOUR_SECONDS,
    MIB,
    block_size_field,
    blocks_field,
    check_name,
    check_redis,
    check_url,
    cluster_field,
    device_field,
    dtype_field,
    engine_field,
    grace_field,
    host_blocks_field,
    host_field,
    log_format_field,
    log_level_field,
    model_field,
    port_field,
    public_prefixes_field,
    redis_field,
    secret_field,
    threads_field,
    token_budget_field,
)
from shared.settings_sources import setting

__all__ = ["ReplicaSettings"]


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """One engine and its prefix cache, served over HTTP."""

    host: str = host_field()
    port: int = port_field(8100)
    redis: str | None = redis_field("Redis to publish to, or none")
    cluster: str = cluster_field()
    secret: str = secret_field()
    id: str | None = setting(None, "name in the fleet; default: made from host and port")
    url: str | None = setting(None, "URL at which routers reach it; default: made from host and port", metavar="URL")
    engine: str = engine_field()
    model: str = model_field()
    block_size: int = block_size_field()
    blocks: int | None = blocks_field()
    host_blocks: int = host_blocks_field()
    whole_blocks: bool = setting(False, "reuse cached blocks as a whole only, never a part of one")
    retained_share: float = setting(0.25, "share of the KV blocks that requests may ask to keep", low=0, high=1)
    sessions: str | None = setting(None, "folder that POST /sessions/<name>/save writes to", metavar="DIR")
    sessions_bytes: int = setting(64 * 2**30, "what the sessions may take together", low=1, high=2**60)
    token_budget: int = token_budget_field()
    max_running: int = setting(64, "requests computed at once", low=1, high=2**16)
    max_waiting: int = setting(1024, "requests that may wait; more are refused with 429", low=0, high=2**20)
    max_model_len: int | None = setting(None, "context in tokens; default: the model's", low=2, high=2**31)
    device: str = device_field()
    dtype: str = dtype_field()
    threads: int | None = threads_field()
    public_prefixes: str | None = public_prefixes_field()
    max_body_bytes: int = setting(64 * MIB, "largest request body", low=1024, high=2**31)
    grace_seconds: float = grace_field()
    log_level: str = log_level_field()
    log_format: str = log_format_field()
    admin_key: str = setting("", "key that GET /cache asks for before it shows text; opens all else", secret=True)
    replica_key: str = setting(
        "", "key that requests must bring; routers send their WARMROUTE_UPSTREAM_KEY", secret=True
    )
    seed: int = setting(0, "of the sampling of requests that bring none", low=0, high=2**63 - 1)
    sim_base_seconds: float = setting(0.008, "simulated: per step", low=0, high=HOUR_SECONDS)
    sim_per_token_seconds: float = setting(5e-5, "simulated: per prefilled token", low=0, high=HOUR_SECONDS)
    sim_per_token_context_seconds: float = setting(
        1e-9, "simulated: per token and token it attends to", low=0, high=HOUR_SECONDS
    )
    sim_per_decode_seconds: float = setting(5e-5, "simulated: per decoded token", low=0, high=HOUR_SECONDS)

    def __post_init__(self) -> None:
        check_name("--cluster", self.cluster)
        if self.id is not None:
            check_name("--id", self.id)
        if self.url is not None:
            check_url("--url", self.url, ("http", "https"))
        check_redis(self.redis)
