"""One dataclass per program; its flags, variables and TOML keys all derive from it (see `settings_sources`).

Made directly, a class has its defaults: `RouterSettings(port=0)`. From the command line: `parse(RouterSettings, argv,
os.environ, "warmroute router")`.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from shared.settings_sources import SettingsError, parse, setting

__all__ = [
    "BENCH_NAMES",
    "BenchRouterSettings",
    "BenchSettings",
    "CompareSettings",
    "DoctorSettings",
    "POLICY_NAMES",
    "ReplicaSettings",
    "RouteSettings",
    "RouterSettings",
    "SettingsError",
    "SimulateSettings",
    "TopSettings",
    "UpSettings",
    "parse",
]

POLICY_NAMES = (
    "cache-aware",
    "round-robin",
    "random",
    "least-loaded",
    "two-choices",
    "consistent-hash",
    "longest-prefix",
    "prefix-tree",
    "session",
)
BENCH_NAMES = ("cache", "pool", "tiers", "prefill", "engine")
_ENGINES = ("torch", "sim")
_LEVELS = ("debug", "info", "warning", "error")
_MIB = 2**20
_HOUR_SECONDS = 3600
_DAY_SECONDS = 24 * _HOUR_SECONDS


def _host(help: str = "address to listen on") -> Any:  # noqa: A002
    return setting("127.0.0.1", help, metavar="ADDRESS")


def _port(default: int, help: str = "port to listen on; 0 takes a free one") -> Any:  # noqa: A002
    return setting(default, help, low=0, high=65535)


def _redis(help: str) -> Any:  # noqa: A002
    return setting(None, help, environment=("REDIS_URL",), metavar="URL", shown=False)


def _cluster() -> Any:
    return setting("default", "name under which replicas and routers find each other in Redis")


def _secret() -> Any:
    return setting("", "signs what is published in Redis and keeps tenants' keys apart", secret=True)


def _log_level() -> Any:
    return setting("info", "least level that is logged", choices=_LEVELS)


def _grace(default: float = 30.0) -> Any:
    return setting(default, "seconds that running requests get to end when stopped", low=0, high=_HOUR_SECONDS)


def _policy() -> Any:
    return setting("cache-aware", "how a replica is chosen", choices=POLICY_NAMES)


def _engine() -> Any:
    return setting("torch", "torch runs the model; sim plays one from a cost model", choices=_ENGINES)


def _model() -> Any:
    return setting("tiny", "tiny (made offline), a directory, or a hub id", metavar="MODEL")


def _block_size() -> Any:
    return setting(16, "tokens per KV block, the same in the whole fleet", low=1, high=4096)


def _blocks(default: int | None = None) -> Any:
    return setting(default, "KV blocks of a replica; default: what the memory allows", low=1, high=2**31)


def _threads() -> Any:
    return setting(None, "CPU threads of a replica; default: all cores, shared among the replicas", low=1, high=1024)


def _device() -> Any:
    return setting("auto", "where the model runs", choices=("auto", "cpu", "cuda"))


def _dtype() -> Any:
    return setting("auto", "number format of weights and KV", choices=("auto", "float32", "bfloat16", "float16"))


def _public_prefixes() -> Any:
    help_line = "file of prompt beginnings that all tenants share, one JSON body a line; the same in the whole fleet"
    return setting(None, help_line, metavar="FILE")


def _token_budget() -> Any:
    return setting(512, "most tokens computed in one step", low=1, high=2**20)


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Send each request where the least work is left to do."""

    host: str = _host()
    port: int = _port(8000)
    redis: str | None = _redis("Redis that replicas publish to, or none")
    cluster: str = _cluster()
    secret: str = _secret()
    replica: tuple[str, ...] = setting((), "URL of a server that does not publish itself; repeatable", metavar="URL")
    policy: str = _policy()
    max_body_bytes: int = setting(64 * _MIB, "largest request body", low=1024, high=2**31)
    max_in_flight: int = setting(4096, "requests at once; more are refused with 429", low=1, high=2**20)
    max_head_bytes: int = setting(16_384, "largest request head", low=1024, high=2**20)
    max_connections: int = setting(16_384, "connections of clients at once", low=1, high=2**20)
    head_timeout_seconds: float = setting(10.0, "for a request's head to come", low=0.01, high=_HOUR_SECONDS)
    body_timeout_seconds: float = setting(60.0, "between two pieces of a request's body", low=0.01, high=_HOUR_SECONDS)
    unread_timeout_seconds: float = setting(
        60.0, "for a client to take what was written to it", low=0.01, high=_HOUR_SECONDS
    )
    idle_timeout_seconds: float = setting(75.0, "between two requests on a connection", low=0.01, high=_DAY_SECONDS)
    connect_timeout_seconds: float = setting(2.0, "to connect to a replica", low=0.01, high=_HOUR_SECONDS)
    first_byte_timeout_seconds: float = setting(300.0, "until a replica's answer begins", low=0.01, high=_DAY_SECONDS)
    chunk_timeout_seconds: float = setting(60.0, "between two pieces of an answer", low=0.01, high=_DAY_SECONDS)
    request_timeout_seconds: float = setting(3600.0, "until a replica's answer ends", low=0.01, high=_DAY_SECONDS)
    max_retries: int = setting(1, "further replicas tried before the first byte", low=0, high=16)
    expect_cached: bool = setting(False, "let a replica refuse a prompt of which it holds much less than published")
    grace_seconds: float = _grace()
    log_level: str = _log_level()
    workers: int = setting(1, "processes", low=1, high=1024)
    tls_certificate: str | None = setting(None, "PEM file of this router's certificate chain", metavar="FILE")
    tls_key: str | None = setting(None, "PEM file of the certificate's key", metavar="FILE")
    tls_ca: str | None = setting(
        None, "PEM file of authorities for https:// replicas; default: the system's", metavar="FILE"
    )
    public_prefixes: str | None = _public_prefixes()
    api_keys: str | None = setting(None, "TOML file of API keys and their tenants; default: open", metavar="FILE")
    admin_key: str = setting("", "key that admin paths ask for", secret=True)

    def __post_init__(self) -> None:
        _check_name("--cluster", self.cluster)
        if self.workers > 1:
            raise SettingsError("--workers above 1 is not supported yet; run several routers side by side instead")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise SettingsError("--tls-certificate and --tls-key are of use together only: give both or neither")
        for url in self.replica:
            _check_url("--replica", url, ("http", "https"))
        _check_redis(self.redis)


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """One engine and its prefix cache, served over HTTP."""

    host: str = _host()
    port: int = _port(8100)
    redis: str | None = _redis("Redis to publish to, or none")
    cluster: str = _cluster()
    secret: str = _secret()
    id: str | None = setting(None, "name in the fleet; default: made from host and port")
    url: str | None = setting(None, "URL at which routers reach it; default: made from host and port", metavar="URL")
    engine: str = _engine()
    model: str = _model()
    block_size: int = _block_size()
    blocks: int | None = _blocks()
    host_blocks: int = setting(0, "KV blocks in host memory behind the device's", low=0, high=2**31)
    whole_blocks: bool = setting(False, "reuse cached blocks as a whole only, never a part of one")
    retained_share: float = setting(0.25, "share of the KV blocks that requests may ask to keep", low=0, high=1)
    sessions: str | None = setting(None, "folder that POST /sessions/<name>/save writes to", metavar="DIR")
    sessions_bytes: int = setting(64 * 2**30, "what the sessions may take together", low=1, high=2**60)
    token_budget: int = _token_budget()
    max_running: int = setting(64, "requests computed at once", low=1, high=2**16)
    max_waiting: int = setting(1024, "requests that may wait; more are refused with 429", low=0, high=2**20)
    max_model_len: int | None = setting(None, "context in tokens; default: the model's", low=2, high=2**31)
    device: str = _device()
    dtype: str = _dtype()
    threads: int | None = _threads()
    public_prefixes: str | None = _public_prefixes()
    max_body_bytes: int = setting(64 * _MIB, "largest request body", low=1024, high=2**31)
    grace_seconds: float = _grace()
    log_level: str = _log_level()
    admin_key: str = setting("", "key that GET /cache asks for before it shows text", secret=True)
    seed: int = setting(0, "of the sampling of requests that bring none", low=0, high=2**63 - 1)
    sim_base_seconds: float = setting(0.008, "simulated: per step", low=0, high=_HOUR_SECONDS)
    sim_per_token_seconds: float = setting(5e-5, "simulated: per prefilled token", low=0, high=_HOUR_SECONDS)
    sim_per_token_context_seconds: float = setting(
        1e-9, "simulated: per token and token it attends to", low=0, high=_HOUR_SECONDS
    )
    sim_per_decode_seconds: float = setting(5e-5, "simulated: per decoded token", low=0, high=_HOUR_SECONDS)

    def __post_init__(self) -> None:
        _check_name("--cluster", self.cluster)
        if self.id is not None:
            _check_name("--id", self.id)
        if self.url is not None:
            _check_url("--url", self.url, ("http", "https"))
        _check_redis(self.redis)


@dataclass(frozen=True, kw_only=True)
class UpSettings:
    """Start Redis, replicas and a router on this machine, and stop all of it on Ctrl-C."""

    replicas: int = setting(2, "number of replicas", low=1, high=64)
    engine: str = _engine()
    model: str = _model()
    policy: str = _policy()
    host: str = _host("address the router listens on")
    port: int = _port(8000, "port the router listens on; 0 takes a free one")
    redis: str | None = _redis("Redis to use; default: one is started")
    cluster: str = _cluster()
    secret: str = _secret()
    blocks: int | None = _blocks()
    block_size: int = _block_size()
    token_budget: int = _token_budget()
    threads: int | None = _threads()
    log_level: str = _log_level()
    grace_seconds: float = _grace(10.0)
    ready_timeout_seconds: float = setting(300.0, "until all must be ready", low=1, high=_DAY_SECONDS)

    def __post_init__(self) -> None:
        _check_name("--cluster", self.cluster)
        _check_redis(self.redis)


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """Run one workload against each policy, each time on cold replicas, and report."""

    policies: tuple[str, ...] = setting(
        ("cache-aware", "round-robin"), "policies to compare, comma-separated", choices=POLICY_NAMES
    )
    workload: str = setting("chat", "what is asked", choices=("shared-prefix", "chat", "few-shot", "rag"))
    trace: str | None = setting(None, "trace to play instead of a workload", metavar="FILE")
    replicas: int = setting(2, "number of replicas", low=1, high=64)
    engine: str = _engine()
    model: str = _model()
    rate: float | None = setting(None, "requests per second; default: what suits the engine", low=0.001, high=100_000)
    requests: int = setting(120, "requests of one run", low=1, high=1_000_000)
    repeats: int = setting(3, "runs per policy, in rotated order", low=1, high=100)
    out: str = setting("reports/compare", "folder for report.html and results.json", metavar="DIR")
    blocks: int | None = _blocks()
    block_size: int = _block_size()
    token_budget: int = _token_budget()
    threads: int | None = _threads()
    redis: str | None = _redis("Redis to use; default: one is started")
    seed: int = setting(0, "of the workload and its arrivals", low=0, high=2**63 - 1)
    groups: int | None = setting(None, "distinct system prompts, tasks or documents", low=1, high=100_000)
    opening_words: int | None = setting(None, "mean length of each of those", low=1, high=100_000)
    turns: int | None = setting(None, "turns of a conversation", low=1, high=1000)
    turn_words: int | None = setting(None, "mean length of what a user says in a turn", low=1, high=100_000)
    open_sessions: int | None = setting(None, "conversations under way at any time", low=1, high=100_000)
    max_tokens: int | None = setting(None, "most tokens of an answer", low=1, high=100_000)
    request_timeout_seconds: float = setting(60.0, "until a request has failed", low=0.1, high=_HOUR_SECONDS)
    log_level: str = setting("warning", "least level that is logged", choices=_LEVELS)

    def __post_init__(self) -> None:
        _check_redis(self.redis)
        if not self.policies:
            raise SettingsError("--policies names no policy")
        if self.trace is not None:
            raise SettingsError("--trace is not supported yet; choose a --workload")


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Measure this machine: one bench by its name, or all that are quick."""

    name: str | None = setting(None, "what to measure", choices=BENCH_NAMES, positional=True)
    repeats: int = setting(5, "measurements of each thing, whose spread is shown", low=1, high=1000)
    seed: int = setting(0, "of what is random in a workload", low=0, high=2**62)
    out: str = setting("reports/bench", "folder for figures and results.json", metavar="DIR")
    engine: str = _engine()
    model: str = _model()
    device: str = _device()
    dtype: str = _dtype()
    threads: int | None = _threads()
    block_size: int = _block_size()


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
    redis: str | None = _redis("Redis to use; default: one is started")
    out: str | None = setting(None, "file for the figures", metavar="FILE")

    def __post_init__(self) -> None:
        _check_redis(self.redis)
        for url in self.peer:
            _check_url("--peer", url, ("http", "https"))


@dataclass(frozen=True, kw_only=True)
class SimulateSettings:
    """Play a trace or a workload against policies, ours and peers', on a fleet in virtual time, and report."""

    policies: tuple[str, ...] = setting(
        ("cache-aware", "round-robin"), "policies to compare, comma-separated, or all", metavar="POLICY"
    )
    trace: str | None = setting(None, "Mooncake or agentic trace to play instead of a workload", metavar="FILE")
    workload: str = setting("shared-prefix", "shared-prefix, chat, rag, agents, bursts or hot-prefix")
    requests: int | None = setting(None, "how many; of a trace, its first conversations", low=1, high=10**8)
    rate: float = setting(20.0, "of a workload, requests per second", low=0.001, high=10**6)
    scale: float = setting(1.0, "stretches the time between arrivals", low=0.001, high=1000)
    load: float | None = setting(None, "or: share of what the fleet computes without a cache", low=0.01, high=10)
    replicas: int = setting(8, "number of replicas", low=1, high=4096)
    blocks: int | None = setting(None, "KV blocks of a replica; default: the profile's", low=1, high=2**31)
    block_size: int = setting(512, "tokens per KV block", low=1, high=4096)
    profile: str = setting("default", "hardware and model: see loadtest/simulator/profiles.py")
    routers: int = setting(1, "routers that share the traffic", low=1, high=1024)
    share_seconds: float = setting(
        0.025, "until routers know of each other's work; 0: they never do", low=0, high=_HOUR_SECONDS
    )
    publish_seconds: float = setting(0.025, "until routers see what a cache holds", low=0, high=_HOUR_SECONDS)
    silent: bool = setting(False, "replicas publish nothing")
    change: tuple[str, ...] = setting((), "leave:r001@60 or join:r001@90 (seconds); repeatable", metavar="CHANGE")
    most_prompt_tokens: int = setting(2**20, "conversations end before longer prompts", low=1, high=2**31)
    most_think_seconds: float = setting(60.0, "longest pause within a conversation", low=0, high=_DAY_SECONDS)
    repeats: int = setting(1, "runs per policy, each with the next seed", low=1, high=100)
    seed: int = setting(0, "of arrivals and random policies", low=0, high=2**63 - 1)
    out: str = setting("reports/simulate", "folder for report.html and results.json", metavar="DIR")

    def __post_init__(self) -> None:
        if not self.policies:
            raise SettingsError("--policies names no policy")


@dataclass(frozen=True, kw_only=True)
class RouteSettings:
    """Ask a running router where it would send a prompt, and why. Nothing is sent."""

    prompt: str = setting(help="the user's message", positional=True)
    router: str = setting("http://127.0.0.1:8000", "URL of the router", metavar="URL")
    model: str | None = setting(None, "default: the first one served", metavar="MODEL")
    admin_key: str = setting("", "key that admin paths ask for", secret=True)

    def __post_init__(self) -> None:
        _check_url("--router", self.router, ("http", "https"))


@dataclass(frozen=True, kw_only=True)
class TopSettings:
    """Watch the replicas of a running router."""

    router: str = setting("http://127.0.0.1:8000", "URL of the router", metavar="URL")
    every_seconds: float = setting(1.0, "between two looks", low=0.1, high=_HOUR_SECONDS)
    once: bool = setting(False, "print one table and end")
    admin_key: str = setting("", "key that admin paths ask for", secret=True)

    def __post_init__(self) -> None:
        _check_url("--router", self.router, ("http", "https"))


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """Say what is found on this machine, and what to do about what is not."""

    port: int = _port(8000, "port that the router is to have")
    redis: str | None = _redis("Redis to try")

    def __post_init__(self) -> None:
        _check_redis(self.redis)


def _check_name(flag: str, name: str) -> None:
    """A part of Redis keys, URLs and headers."""
    if not re.fullmatch(r"[A-Za-z0-9._:@+-]{1,128}", name):
        raise SettingsError(f"{flag} must be 1 to 128 letters, digits or ._:@+- and not {name[:50]!r}")


def _check_redis(url: str | None) -> None:
    if url is not None:
        _check_url("--redis", url, ("redis", "rediss", "unix"))


def _check_url(source: str, url: str, schemes: tuple[str, ...]) -> None:
    # The URL itself stays out of the message: it may hold a password.
    expected = f"{source} must be a URL like {schemes[0]}://host:port"
    try:
        parts = urlsplit(url)
        port = parts.port
        if parts.hostname and ":" in parts.hostname:
            ipaddress.ip_address(parts.hostname.split("%")[0])
    except ValueError as error:
        raise SettingsError(f"{expected}: {error}") from None
    if parts.scheme not in schemes or not (parts.hostname or parts.scheme == "unix") or port == 0:
        raise SettingsError(expected)
