"""What `warmroute up` and `warmroute doctor` can be told."""

from __future__ import annotations

from dataclasses import dataclass

from shared.settings_fields import (
    DAY_SECONDS,
    block_size_field,
    blocks_field,
    check_name,
    check_redis,
    cluster_field,
    decision_log_field,
    engine_field,
    grace_field,
    host_blocks_field,
    host_field,
    log_level_field,
    model_field,
    policy_field,
    port_field,
    redis_field,
    secret_field,
    threads_field,
    token_budget_field,
)
from shared.settings_sources import setting

__all__ = ["DoctorSettings", "UpSettings"]


@dataclass(frozen=True, kw_only=True)
class UpSettings:
    """Start Redis, replicas and a router on this machine, and stop all of it on Ctrl-C."""

    replicas: int = setting(2, "number of replicas", low=1, high=64)
    engine: str = engine_field()
    model: str = model_field()
    policy: str = policy_field()
    host: str = host_field("address the router listens on")
    port: int = port_field(8000, "port the router listens on; 0 takes a free one")
    redis: str | None = redis_field("Redis to use; default: one is started")
    cluster: str = cluster_field()
    secret: str = secret_field()
    blocks: int | None = blocks_field()
    host_blocks: int = host_blocks_field()
    block_size: int = block_size_field()
    token_budget: int = token_budget_field()
    threads: int | None = threads_field()
    decision_log: str | None = decision_log_field()
    log_level: str = log_level_field()
    grace_seconds: float = grace_field(10.0)
    ready_timeout_seconds: float = setting(300.0, "until all must be ready", low=1, high=DAY_SECONDS)

    def __post_init__(self) -> None:
        check_name("--cluster", self.cluster)
        check_redis(self.redis)


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """Say what is found on this machine, and what to do about what is not."""

    port: int = port_field(8000, "port that the router is to have")
    redis: str | None = redis_field("Redis to try")

    def __post_init__(self) -> None:
        check_redis(self.redis)
