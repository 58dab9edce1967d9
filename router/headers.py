"""Which headers pass through the router, in either direction, and which it writes itself.

Dropped: hop-by-hop headers (RFC 9110, 7.6.1) with those that `Connection` names, and everything `x-warmroute-*` that a
client sends: those are the router's to say. All others pass as they came.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import count

from router.http1 import Head
from router.tracing import NO_TRACE, Trace
from shared.tenant_proof import PROOF_HEADER, TENANT_HEADER, TenantProofs

__all__ = ["SESSION_HEADER", "RequestHeaders", "RequestIds", "response_headers", "safe_value"]

SESSION_HEADER = b"x-session-id"
"""What a client calls the conversation, where its API has no field for that. Passes on like any other."""
_OWN_PREFIX = b"x-warmroute-"
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Said anew on the way to a replica: where it goes, how long the body is, and that the body is already here.
_REWRITTEN = frozenset({b"host", b"content-length", b"expect", b"x-request-id"})
_NOT_SENT_ON = _HOP_BY_HOP | _REWRITTEN
_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
# The ids are the router's to say. The second is Anthropic's.
_NOT_SENT_BACK = _HOP_BY_HOP | {b"x-request-id", b"request-id"}
_NOT_FOR_CLIENTS = re.compile(
    rb"\r\n(?:%b|%b[^:\r\n]*):[^\r\n]*" % (b"|".join(sorted(_NOT_SENT_BACK)), _OWN_PREFIX), re.IGNORECASE
)
_KEEPING = frozenset({b"close", b"keep-alive"})
"""What `Connection` says mostly, and names no header with."""
_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_UNSAFE = re.compile(r"[^\x20-\x7e]+")
_LONGEST_VALUE = 512
_LONGEST_KEPT, _MOST_KEPT = 64, 4096
"""Characters of a value whose line is remembered, and lines: most headers of ours say one of a few things."""

RawHeaders = Sequence[tuple[bytes, bytes]]
"""Names and values as they came."""


class RequestIds:
    """The client's own id where it is sane, else one that is unique across restarts and routers."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(6)
        self._numbers = count()

    def of(self, given: bytes | None) -> str:
        if given and _SANE_ID.fullmatch(given):
            return given.decode()
        return f"{self._prefix}-{next(self._numbers):x}"


class RequestHeaders:
    """What goes to replicas. Keys for this router never go on: the `admin_key`, and a tenant's API key.

    With an `upstream_key` the router asks in its own name: clients' credentials give way to that key. With a `secret`
    it proves to replicas whose requests it brings.
    """

    def __init__(self, admin_key: str = "", upstream_key: str = "", secret: str = "") -> None:
        self._admin_key = admin_key.encode()
        self._key_line = b"authorization: Bearer %b\r\n" % upstream_key.encode() if upstream_key else b""
        self._proofs = TenantProofs(secret) if secret else None

    def are_credentials_ours(self, tenant: str) -> bool:
        """A replica that refuses them refuses the router, not the client."""
        return bool(tenant or self._key_line)

    def lines(self, received: RawHeaders, request_id: str, tenant: str = "", trace: Trace = NO_TRACE) -> bytes:
        named = [value for name, value in received if name.lower() == b"connection"]
        dropped = _NOT_SENT_ON | _named_by(named) if named else _NOT_SENT_ON
        if self.are_credentials_ours(tenant):
            dropped |= _CREDENTIALS
        if trace.dropped:
            dropped |= trace.dropped
        admin_key = self._admin_key
        lines = []
        for name, value in received:
            lowered = name.lower()
            if lowered in dropped or lowered.startswith(_OWN_PREFIX) or (admin_key and admin_key in value):
                continue
            lines.append(b"%b: %b\r\n" % (name, value))
        lines.append(b"x-request-id: %b\r\n%b" % (request_id.encode(), self._key_line))
        if tenant:
            lines.append(f"{TENANT_HEADER}: {tenant}\r\n".encode())
            if self._proofs is not None:
                lines.append(f"{PROOF_HEADER}: {self._proofs.of(tenant)}\r\n".encode())
        lines.append(trace.lines)
        return b"".join(lines)

    @property
    def of_probes(self) -> bytes:
        """With which the router asks for itself, on a connection that is not kept."""
        return b"Connection: close\r\n" + self._key_line


def response_headers(received: Head, own: Iterable[tuple[str, str]]) -> bytes:
    """What goes to the client, as lines: the replica's, and the router's `own` in place of any of the same name."""
    kept = _NOT_FOR_CLIENTS.sub(b"", received.lines)[2:]
    if (named := received.all(b"connection")) and not _KEEPING.issuperset(dropped := _named_by(named)):
        kept = b"\r\n".join([line for line in kept.split(b"\r\n") if line.partition(b":")[0].lower() not in dropped])
    lines = [kept] if kept else []
    lines += [_own_line(name, value) if len(value) <= _LONGEST_KEPT else _line(name, value) for name, value in own]
    lines.append(b"")
    return b"\r\n".join(lines)


def safe_value(value: str) -> str:
    """Printable ASCII of bounded length: nothing that a replica or client named can end a header line."""
    if len(value) <= _LONGEST_VALUE and value.isascii() and value.isprintable():
        return value
    return _UNSAFE.sub("?", value[:_LONGEST_VALUE])


def _named_by(connection_headers: Iterable[bytes]) -> frozenset[bytes]:
    return frozenset(name.strip().lower() for value in connection_headers for name in value.split(b","))


def _line(name: str, value: str) -> bytes:
    return f"{name}: {safe_value(value)}".encode()


_own_line = lru_cache(_MOST_KEPT)(_line)
