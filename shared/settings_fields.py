"""Fields that several programs' settings share, and what is checked of names and URLs."""

from __future__ import annotations

import ipaddress
import re
from typing import Any
from urllib.parse import urlsplit

from shared.settings_sources import SettingsError, setting

__all__ = [
    "BENCH_NAMES",
    "DAY_SECONDS",
    "ENGINES",
    "HOUR_SECONDS",
    "LEVELS",
    "MIB",
    "POLICY_NAMES",
    "block_size_field",
    "blocks_field",
    "check_key",
    "check_name",
    "check_redis",
    "check_url",
    "cluster_field",
    "decision_log_field",
    "device_field",
    "dtype_field",
    "engine_field",
    "grace_field",
    "host_blocks_field",
    "host_field",
    "log_format_field",
    "log_level_field",
    "model_field",
    "policy_field",
    "port_field",
    "public_prefixes_field",
    "redis_field",
    "secret_field",
    "threads_field",
    "token_budget_field",
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
BENCH_NAMES = ("cache", "pool", "index", "tiers", "prefill", "engine")
ENGINES = ("torch", "sim")
LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
MIB = 2**20
HOUR_SECONDS = 3600
DAY_SECONDS = 24 * HOUR_SECONDS


def host_field(help: str = "address to listen on") -> Any:  # noqa: A002
    return setting("127.0.0.1", help, metavar="ADDRESS")


def port_field(default: int, help: str = "port to listen on; 0 takes a free one") -> Any:  # noqa: A002
    return setting(default, help, low=0, high=65535)


def redis_field(help: str) -> Any:  # noqa: A002
    return setting(None, help, environment=("REDIS_URL",), metavar="URL", shown=False)


def cluster_field() -> Any:
    return setting("default", "name under which replicas and routers find each other in Redis")


def secret_field() -> Any:
    return setting("", "signs what goes through Redis, proves tenants to replicas, keeps their keys apart", secret=True)


def log_level_field() -> Any:
    return setting("info", "least level that is logged", choices=LEVELS)


def log_format_field() -> Any:
    return setting("text", "how a line of the log is written: text is key=value", choices=LOG_FORMATS)


def grace_field(default: float = 30.0) -> Any:
    return setting(default, "seconds that running requests get to end when stopped", low=0, high=HOUR_SECONDS)


def policy_field() -> Any:
    return setting("cache-aware", "how a replica is chosen", choices=POLICY_NAMES)


def decision_log_field() -> Any:
    return setting(None, "file that tells each decision, for simulate --decisions; no prompts in it", metavar="FILE")


def engine_field() -> Any:
    return setting("torch", "torch runs the model; sim plays one from a cost model", choices=ENGINES)


def model_field() -> Any:
    return setting("tiny", "tiny (made offline), a directory, or a hub id", metavar="MODEL")


def block_size_field() -> Any:
    return setting(16, "tokens per KV block, the same in the whole fleet", low=1, high=4096)


def blocks_field(default: int | None = None) -> Any:
    return setting(default, "KV blocks of a replica; default: what the memory allows", low=1, high=2**31)


def host_blocks_field() -> Any:
    return setting(0, "KV blocks in host memory behind the device's", low=0, high=2**31)


def threads_field() -> Any:
    return setting(None, "CPU threads of a replica; default: all cores, shared among the replicas", low=1, high=1024)


def device_field() -> Any:
    return setting("auto", "where the model runs", choices=("auto", "cpu", "cuda"))


def dtype_field() -> Any:
    return setting("auto", "number format of weights and KV", choices=("auto", "float32", "bfloat16", "float16"))


def public_prefixes_field() -> Any:
    help_line = "file of prompt beginnings that all tenants share, one JSON body a line; the same in the whole fleet"
    return setting(None, help_line, metavar="FILE")


def token_budget_field() -> Any:
    return setting(512, "most tokens computed in one step", low=1, high=2**20)


def check_name(flag: str, name: str) -> None:
    """A part of Redis keys, URLs and headers."""
    if not re.fullmatch(r"[A-Za-z0-9._:@+-]{1,128}", name):
        raise SettingsError(f"{flag} must be 1 to 128 letters, digits or ._:@+- and not {name[:50]!r}")


def check_key(source: str, key: str) -> None:
    """What goes into a header as it is. The message does not quote it."""
    if not (key.isascii() and (key.isprintable() or not key)) or " " in key:
        raise SettingsError(f"{source} must be printable ASCII characters without spaces")


def check_redis(url: str | None) -> None:
    if url is not None:
        check_url("--redis", url, ("redis", "rediss", "unix"))


def check_url(source: str, url: str, schemes: tuple[str, ...]) -> None:
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
