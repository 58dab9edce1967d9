"""What the comparison, the simulator and the benches can be told."""

from __future__ import annotations

from dataclasses import dataclass

from shared.settings_fields import (
    BENCH_NAMES,
    DAY_SECONDS,
    HOUR_SECONDS,
    LEVELS,
    POLICY_NAMES,
    block_size_field,
    blocks_field,
    check_redis,
    check_url,
    device_field,
    dtype_field,
    engine_field,
    model_field,
    redis_field,
    threads_field,
    token_budget_field,
)
from shared.settings_sources import SettingsError, setting

__all__ = ["BenchRouterSettings", "BenchSettings", "CompareSettings", "SimulateSettings"]


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """Run one workload against each policy, each time on cold replicas, and report."""

    policies: tuple[str, ...] = setting(
        ("cache-aware", "round-robin"), "policies to compare, comma-separated", choices=POLICY_NAMES
    )
    peers: tuple[str, ...] = setting(
        (),
        "another router for the same replicas, and how to start it: {port} and {replicas} are filled in; repeatable",
        metavar="NAME=COMMAND",
    )
    workload: str = setting("chat", "what is asked", choices=("shared-prefix", "chat", "few-shot", "rag"))
    trace: str | None = setting(None, "Mooncake or agentic trace to play instead of a workload", metavar="FILE")
    scale: float = setting(1.0, "stretches the times between a trace's requests", low=0.001, high=1000)
    shrink: int = setting(1, "tells a trace's prompts, blocks and answers so many times shorter", low=1, high=1024)
    replicas: int = setting(2, "number of replicas", low=1, high=64)
    engine: str = engine_field()
    model: str = model_field()
    rate: float | None = setting(None, "requests per second; default: what suits the engine", low=0.001, high=100_000)
    rates: tuple[str, ...] = setting(
        (), "several rates, one after the other; 75% is that share of what sim replicas compute uncached", metavar="A,B"
    )
    objective: str = setting("ttft=1,tpot=0.1", "seconds within which a request counts as goodput", metavar="LIMITS")
    simulate: bool = setting(False, "play the same arrivals in the simulator too, and tell its error (engine sim)")
    requests: int = setting(120, "requests of one run", low=1, high=1_000_000)
    repeats: int = setting(3, "runs per policy, in rotated order", low=1, high=100)
    out: str = setting("reports/compare", "folder for report.html and results.json", metavar="DIR")
    blocks: int | None = blocks_field()
    block_size: int = block_size_field()
    token_budget: int = token_budget_field()
    threads: int | None = threads_field()
    replica_flags: str = setting("", "further flags of the replicas, as one string", metavar="FLAGS")
    redis: str | None = redis_field("Redis to use; default: one is started")
    seed: int = setting(0, "of the workload and its arrivals", low=0, high=2**63 - 1)
    groups: int | None = setting(None, "distinct system prompts, tasks or documents", low=1, high=100_000)
    opening_words: int | None = setting(None, "mean length of each of those", low=1, high=100_000)
    turns: int | None = setting(None, "turns of a conversation", low=1, high=1000)
    turn_words: int | None = setting(None, "mean length of what a user says in a turn", low=1, high=100_000)
    open_sessions: int | None = setting(None, "conversations under way at any time", low=1, high=100_000)
    max_tokens: int | None = setting(None, "most tokens of an answer", low=1, high=100_000)
    request_timeout_seconds: float = setting(60.0, "until a request has failed", low=0.1, high=HOUR_SECONDS)
    log_level: str = setting("warning", "least level that is logged", choices=LEVELS)

    def __post_init__(self) -> None:
        check_redis(self.redis)
        if not self.policies and not self.peers:
            raise SettingsError("--policies names no policy, and --peers nobody else")
        if self.rate is not None and self.rates:
            raise SettingsError("--rate and --rates exclude each other")
        if self.trace is None and (self.scale, self.shrink) != (1.0, 1):
            raise SettingsError("--scale and --shrink belong to a --trace")
        if self.scale != 1.0 and (self.rate is not None or self.rates):
            raise SettingsError("--scale excludes --rate and --rates, which set a trace's pace too")
        if self.engine != "sim" and (self.simulate or any(rate.endswith("%") for rate in self.rates)):
            raise SettingsError("--simulate and rates in % need --engine sim: only its costs are known beforehand")


@dataclass(frozen=True, kw_only=True)
class SimulateSettings:
    """Play a trace or a workload against policies, ours and peers', on a fleet in virtual time, and report."""

    policies: tuple[str, ...] = setting(
        ("cache-aware", "round-robin"), "policies to compare, comma-separated, or all", metavar="POLICY"
    )
    trace: str | None = setting(None, "Mooncake or agentic trace to play instead of a workload", metavar="FILE")
    decisions: str | None = setting(
        None, "instead of playing: a router's decision log, to ask policies what they would have chosen", metavar="FILE"
    )
    workload: str = setting("shared-prefix", "shared-prefix, chat, rag, agents, bursts or hot-prefix")
    requests: int | None = setting(None, "how many; of a trace, its first conversations", low=1, high=10**8)
    rate: float = setting(20.0, "of a workload, requests per second", low=0.001, high=10**6)
    scale: float = setting(1.0, "stretches the time between arrivals", low=0.001, high=1000)
    load: float | None = setting(None, "or: share of what the fleet computes without a cache", low=0.01, high=10)
    replicas: int = setting(8, "number of replicas", low=1, high=4096)
    blocks: int | None = setting(None, "KV blocks of a replica; default: the profile's", low=1, high=2**31)
    block_size: int = setting(512, "tokens per KV block", low=1, high=4096)
    host_blocks: int = setting(0, "KV blocks that each replica keeps in host memory too", low=0, high=2**31)
    profile: str = setting("default", "hardware and model: see loadtest/simulator/profiles.py")
    routers: int = setting(1, "routers that share the traffic", low=1, high=1024)
    share_seconds: float = setting(
        0.025, "until routers know of each other's work; 0: they never do", low=0, high=HOUR_SECONDS
    )
    publish_seconds: float = setting(0.025, "until routers see what a cache holds", low=0, high=HOUR_SECONDS)
    silent: bool = setting(False, "replicas publish nothing")
    change: tuple[str, ...] = setting((), "drain:r001@60, or leave or join (seconds); repeatable", metavar="CHANGE")
    most_prompt_tokens: int = setting(2**20, "conversations end before longer prompts", low=1, high=2**31)
    most_think_seconds: float = setting(60.0, "longest pause within a conversation", low=0, high=DAY_SECONDS)
    repeats: int = setting(1, "runs per policy, each with the next seed", low=1, high=100)
    seed: int = setting(0, "of arrivals and random policies", low=0, high=2**63 - 1)
    out: str = setting("reports/simulate", "folder for report.html and results.json", metavar="DIR")

    def __post_init__(self) -> None:
        if not self.policies:
            raise SettingsError("--policies names no policy")
        if self.trace is not None and self.decisions is not None:
            raise SettingsError("--trace plays traffic, --decisions asks again about a log: give one of them")


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Measure this machine: one bench by its name, or all that are quick."""

    name: str | None = setting(None, "what to measure", choices=BENCH_NAMES, positional=True)
    repeats: int = setting(5, "measurements of each thing, whose spread is shown", low=1, high=1000)
    seed: int = setting(0, "of what is random in a workload", low=0, high=2**62)
    out: str = setting("reports/bench", "folder for figures and results.json", metavar="DIR")
    engine: str = engine_field()
    model: str = model_field()
    device: str = device_field()
    dtype: str = dtype_field()
    threads: int | None = threads_field()
    block_size: int = block_size_field()


@dataclass(frozen=True, kw_only=True)
class BenchRouterSettings:
    """Measure what a request costs in the router, beside other routers, over replicas that answer at once."""

    requests: int = setting(4000, "requests of one measurement; an eighth of it for streams", low=80, high=10**7)
    repeats: int = setting(5, "rounds, in which all contestants take turns", low=1, high=1000)
    connections: int = setting(32, "connections of the load generator; 200 for streams", low=1, high=4096)
    rate: float = setting(300.0, "requests per second while latency is measured", low=1, high=100_000)
    soak_requests: int = setting(
        0, "further requests, over which memory should not grow once 20000 of them are through", low=0, high=10**9
    )
    replicas: int = setting(4, "number of replicas", low=1, high=64)
    router_flags: str = setting("", "further flags of our router, as one string", metavar="FLAGS")
    peer: tuple[str, ...] = setting((), "URL of another router over the same replicas; repeatable", metavar="URL")
    peer_command: tuple[str, ...] = setting(
        (), "how to start another router: {port} and {replicas} are filled in; repeatable", metavar="COMMAND"
    )
    redis: str | None = redis_field("Redis to use; default: one is started")
    out: str | None = setting(None, "file for the figures", metavar="FILE")

    def __post_init__(self) -> None:
        check_redis(self.redis)
        for url in self.peer:
            check_url("--peer", url, ("http", "https"))
