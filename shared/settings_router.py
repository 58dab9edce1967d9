"""What `warmroute router` can be told, and the commands that ask a running router."""

from __future__ import annotations

from dataclasses import dataclass

from shared.settings_fields import (
    DAY_SECONDS,
    HOUR_SECONDS,
    MIB,
    check_key,
    check_name,
    check_redis,
    check_url,
    cluster_field,
    decision_log_field,
    grace_field,
    host_field,
    log_format_field,
    log_level_field,
    policy_field,
    port_field,
    public_prefixes_field,
    redis_field,
    secret_field,
)
from shared.settings_sources import SettingsError, setting

UNANSWERED = ("none", "generation", "all")

__all__ = ["RouteSettings", "RouterSettings", "TopSettings"]


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Send each request where the least work is left to do."""

    host: str = host_field()
    port: int = port_field(8000)
    redis: str | None = redis_field("Redis that replicas publish to, or none")
    cluster: str = cluster_field()
    secret: str = secret_field()
    replica: tuple[str, ...] = setting((), "URL of a server that does not publish itself; repeatable", metavar="URL")
    policy: str = policy_field()
    max_body_bytes: int = setting(64 * MIB, "largest request body", low=1024, high=2**31)
    max_in_flight: int = setting(4096, "requests at once; more wait for their turn", low=1, high=2**20)
    max_queue: int = setting(1024, "requests that wait; more are refused with 429", low=0, high=2**20)
    max_queue_seconds: float = setting(30.0, "waiting, before it ends with 503", low=0.01, high=HOUR_SECONDS)
    max_head_bytes: int = setting(16_384, "largest request head", low=1024, high=2**20)
    max_connections: int = setting(16_384, "connections of clients at once", low=1, high=2**20)
    head_timeout_seconds: float = setting(10.0, "for a request's head to come", low=0.01, high=HOUR_SECONDS)
    body_timeout_seconds: float = setting(60.0, "between two pieces of a request's body", low=0.01, high=HOUR_SECONDS)
    unread_timeout_seconds: float = setting(
        60.0, "for a client to take what was written to it", low=0.01, high=HOUR_SECONDS
    )
    idle_timeout_seconds: float = setting(75.0, "between two requests on a connection", low=0.01, high=DAY_SECONDS)
    connect_timeout_seconds: float = setting(2.0, "to connect to a replica", low=0.01, high=HOUR_SECONDS)
    first_byte_timeout_seconds: float = setting(300.0, "until a replica's answer begins", low=0.01, high=DAY_SECONDS)
    chunk_timeout_seconds: float = setting(60.0, "between two pieces of an answer", low=0.01, high=DAY_SECONDS)
    request_timeout_seconds: float = setting(
        3600.0, "from a request's arrival to its answer's end, retries included", low=0.01, high=DAY_SECONDS
    )
    max_retries: int = setting(1, "further replicas that a request is sent to, before the first byte", low=0, high=16)
    retry_budget: float = setting(0.2, "retries per request, in the long run", low=0, high=16)
    retry_unanswered: str = setting(
        "generation", "what is sent again though a replica may have executed it", choices=UNANSWERED
    )
    expect_cached: bool = setting(False, "let a replica refuse a prompt of which it holds much less than published")
    decision_log: str | None = decision_log_field()
    decision_log_bytes: int = setting(64 * MIB, "size at which it becomes FILE.1 and starts anew", low=MIB, high=2**40)
    grace_seconds: float = grace_field()
    log_level: str = log_level_field()
    log_format: str = log_format_field()
    workers: int = setting(1, "processes that share the port and the limits on requests", low=1, high=256)
    tls_certificate: str | None = setting(None, "PEM file of this router's certificate chain", metavar="FILE")
    tls_key: str | None = setting(None, "PEM file of the certificate's key", metavar="FILE")
    tls_handshake_timeout_seconds: float = setting(
        10.0, "from a client's connection to the end of its TLS handshake", low=0.01, high=HOUR_SECONDS
    )
    tls_ca: str | None = setting(
        None, "PEM file of authorities for https:// replicas; default: the system's", metavar="FILE"
    )
    public_prefixes: str | None = public_prefixes_field()
    api_keys: str | None = setting(None, "TOML file of API keys and their tenants; default: open", metavar="FILE")
    admin_key: str = setting("", "key that admin paths ask for", secret=True)
    upstream_key: str = setting(
        "",
        "key that replicas ask for, or WARMROUTE_REPLICA_KEY",
        environment=("WARMROUTE_REPLICA_KEY",),
        secret=True,
    )

    def __post_init__(self) -> None:
        check_key("WARMROUTE_UPSTREAM_KEY", self.upstream_key)
        check_name("--cluster", self.cluster)
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise SettingsError("--tls-certificate and --tls-key are of use together only: give both or neither")
        for url in self.replica:
            check_url("--replica", url, ("http", "https"))
        check_redis(self.redis)


@dataclass(frozen=True, kw_only=True)
class RouteSettings:
    """Ask a running router where it would send a prompt, and why. Nothing is sent."""

    prompt: str = setting(help="the user's message", positional=True)
    router: str = setting("http://127.0.0.1:8000", "URL of the router", metavar="URL")
    model: str | None = setting(None, "default: the first one served", metavar="MODEL")
    api_key: str = setting("", "key that the router asks for, if it does", secret=True)

    def __post_init__(self) -> None:
        check_url("--router", self.router, ("http", "https"))


@dataclass(frozen=True, kw_only=True)
class TopSettings:
    """Watch the replicas of a running router."""

    router: str = setting("http://127.0.0.1:8000", "URL of the router", metavar="URL")
    every_seconds: float = setting(1.0, "between two looks", low=0.1, high=HOUR_SECONDS)
    once: bool = setting(False, "print one table and end")
    api_key: str = setting("", "key that the router asks for, if it does", secret=True)

    def __post_init__(self) -> None:
        check_url("--router", self.router, ("http", "https"))
