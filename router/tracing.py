"""W3C trace context: which trace a request belongs to, and what of it goes on to the replica.

    traceparent: 00-<trace id, 32 hex digits>-<parent id, 16>-<flags, 2>       tracestate: whatever vendors add

Without a tracer of its own the router is no part of a trace: both pass as they came. What is malformed by the standard
is not passed on, nor a tracestate that belongs to it. A tracer (see `otel`) puts its own span in the parent's place.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from router.client_request import ClientRequest

if TYPE_CHECKING:
    from router.exchange import Exchange

__all__ = ["NO_TRACE", "TRACEPARENT", "TRACESTATE", "BeginTrace", "Parent", "Trace", "parent_of", "trace_of"]

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
# Later versions may say more behind what is known; version ff is forbidden, and ids of zeros mean none.
_FORM = re.compile(
    rb"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})(?P<parent>[0-9a-f]{16})"
    rb"-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)


class Parent(NamedTuple):
    """The client's span."""

    trace_id: str
    span_id: str
    flags: int


class Trace:
    """Of one request. `dropped` headers do not go on as they came; `lines` go in their place."""

    __slots__ = ("dropped", "lines", "trace_id")

    def __init__(self, trace_id: str = "", dropped: frozenset[bytes] = frozenset(), lines: bytes = b"") -> None:
        self.trace_id = trace_id
        self.dropped = dropped
        self.lines = lines

    def end(self, exchange: Exchange) -> None:
        """The request is over."""


BeginTrace = Callable[[ClientRequest], Trace]

NO_TRACE = Trace()
_MALFORMED = Trace(dropped=frozenset({TRACEPARENT, TRACESTATE}))


def trace_of(request: ClientRequest) -> Trace:
    """Where the router traces nothing itself."""
    if TRACEPARENT not in request.fields:
        return _MALFORMED if TRACESTATE in request.fields else NO_TRACE
    parent = parent_of(request)
    return _MALFORMED if parent is None else Trace(parent.trace_id)


def parent_of(request: ClientRequest) -> Parent | None:
    """None where there is none, or none that can be understood."""
    given = request.header(TRACEPARENT)
    if given is None:
        return None
    match = _FORM.fullmatch(given)
    twice = sum(name.lower() == TRACEPARENT for name, _ in request.headers) > 1
    if match is None or twice or (match["version"] == b"00" and match["more"] is not None):
        return None
    return Parent(match["trace"].decode(), match["parent"].decode(), int(match["flags"], 16))
