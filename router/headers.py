"""Which headers pass through the router, in either direction, and which it writes itself.

Dropped: hop-by-hop headers (RFC 9110, 7.6.1) with those that `Connection` names, and everything `x-warmroute-*` that a
client sends: those are the router's to say. All others pass as they came.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from itertools import count

from multidict import CIMultiDict

__all__ = ["RequestIds", "request_headers", "response_headers", "safe_value"]

_OWN_PREFIX = "x-warmroute-"
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# Said anew on the way to a replica: where it goes, how long the body is, and that the body is already here.
_REWRITTEN = frozenset({"host", "content-length", "expect", "x-request-id"})
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_UNSAFE = re.compile(r"[^\x20-\x7e]+")
_LONGEST_VALUE = 512


class RequestIds:
    """The client's own id where it is sane, else one that is unique across restarts and routers."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(6)
        self._numbers = count()

    def of(self, given: str | None) -> str:
        if given and _SANE_ID.fullmatch(given):
            return given
        return f"{self._prefix}-{next(self._numbers):x}"


def request_headers(received: Mapping[str, str], request_id: str, admin_key: str = "") -> CIMultiDict[str]:
    """What goes to the replica. The cluster's `admin_key` is for this router alone and never goes on."""
    dropped = _HOP_BY_HOP | _REWRITTEN | _named_by_connection(received)
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in received.items():
        lowered = name.lower()
        if lowered in dropped or lowered.startswith(_OWN_PREFIX) or (admin_key and admin_key in value):
            continue
        kept.add(name, value)
    kept["x-request-id"] = request_id
    return kept


def response_headers(received: Mapping[str, str], own: Iterable[tuple[str, str]]) -> CIMultiDict[str]:
    """What goes to the client: the replica's headers, and the router's `own` in place of any of the same name."""
    dropped = _HOP_BY_HOP | _named_by_connection(received)
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in received.items():
        lowered = name.lower()
        if lowered not in dropped and not lowered.startswith(_OWN_PREFIX):
            kept.add(name, value)
    for name, value in own:
        kept[name] = safe_value(value)
    return kept


def safe_value(value: str) -> str:
    """Printable ASCII of bounded length: nothing that a replica or client named can end a header line."""
    return _UNSAFE.sub("?", value[:_LONGEST_VALUE])


def _named_by_connection(received: Mapping[str, str]) -> frozenset[str]:
    connection = received.get("Connection")
    if connection is None:
        return frozenset()
    return frozenset(name.strip().lower() for name in connection.split(","))
