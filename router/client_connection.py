"""One client's connection: HTTP/1.1 in, answers out, one request at a time in the order in which they came.

    idle --head--> handling ---------------------------> answered --> idle again, or closed
                     `-- its body comes as `read_body` asks for it

Whoever leaves cancels the handler of its request wherever that waits. A client that only ends its sending side (to us
the same) is told `100 Continue`, which a connection that is gone answers with a reset; it gets its answer.
All that may take long has a deadline, which one sweep over all connections watches: see `expire`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast

from router.client_request import ClientRequest, Handler, Response
from router.framing import Body, MalformedError
from router.http1 import body_of_request, could_begin_head, parse_request_head
from shared.api_errors import ApiError, body_ended_early, body_too_large, dialect_of, expectation_failed
from shared.telemetry import fields

__all__ = ["MOST_REFUSED", "ClientConnection", "ClientLimits"]

_logger = logging.getLogger(__name__)

_MOST_AHEAD = 262_144
"""Bytes taken of requests whose turn has not come, and of a body that nobody has asked for."""
MOST_REFUSED = 64
"""Connections beyond the limit that are told so at a time; more are hung up on."""
_MOST_HEADERS = 128
_LINGER_SECONDS = 2.0
"""After an answer to what was not read to its end, for the client to see it: a reset would overtake it."""
_FIRST_LOOK_SECONDS = 0.05
_NEVER = float("inf")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


@dataclass(frozen=True, slots=True)
class ClientLimits:
    max_connections: int
    max_head_bytes: int
    max_body_bytes: int
    head_timeout_seconds: float
    """From a head's first byte to its last."""
    body_timeout_seconds: float
    """Between two pieces of a body."""
    unread_timeout_seconds: float
    """For a client to take what was written to it."""
    idle_timeout_seconds: float
    """Between two requests."""
    handshake_timeout_seconds: float = 10.0
    """Of TLS, from the connection to its end."""


class ClientConnection(asyncio.Protocol):
    """`handle` answers its requests; it is in `connections` for as long as it is open."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handle: Handler,
        limits: ClientLimits,
        connections: set[ClientConnection],
    ) -> None:
        self._loop = loop
        self._handle = handle
        self._limits = limits
        self._connections = connections
        self._transport: asyncio.Transport
        self._received = b""
        """Of a head that is not complete, or of requests whose turn has not come."""
        self._request: ClientRequest | None = None
        self.task: asyncio.Task[None] | None = None
        """Answers the present request."""
        self._framing: Body | None = None
        """Of a body that has not come to its end."""
        self._body = bytearray()
        self._body_error: ApiError | None = None
        self._body_asked = False
        self._waiter: asyncio.Future[None] | None = None
        self._reading = True
        self._half_closed = False
        self._lingering = False
        self.begun = False
        """The answer to the present request has begun."""
        self.slow = False
        """The client does not keep up: write no more until `drained`."""
        self.deadline = _NEVER
        """See `expire`."""

    @property
    def peer(self) -> str:
        address = self._transport.get_extra_info("peername")
        return str(address[0]) if address else ""

    @property
    def closing(self) -> bool:
        return self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self.deadline = self._loop.time() + self._limits.head_timeout_seconds
        if len(self._connections) > self._limits.max_connections + MOST_REFUSED:
            self._transport.abort()
        elif len(self._connections) > self._limits.max_connections:
            message = f"{self._limits.max_connections} connections are open, the most this router takes: retry later"
            self._refuse(ApiError(503, "too_many_connections", message, retry_after_seconds=1.0))

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        self._received = b""
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._framing is not None:
            self._take_body(data)
        elif self._request is not None:
            self._received += data
            if len(self._received) > _MOST_AHEAD:
                self._pause_reading()
        elif not self._lingering:
            self._take_head(data)

    def eof_received(self) -> bool:
        """True: the client still gets its answer."""
        if self._request is None or self._transport.get_extra_info("sslcontext") is not None:
            return False  # TLS has no half-closed connections
        if self.begun:
            self._transport.abort()  # it has seen enough
            return False
        self._half_closed = True
        if self._framing is not None:
            self._fail_body(body_ended_early())
        elif self._request.modern:
            self._transport.write(_CONTINUE)
            self._loop.call_later(_FIRST_LOOK_SECONDS, self._look_for_reset, _FIRST_LOOK_SECONDS)
        return True

    def pause_writing(self) -> None:
        self.slow = True
        self.deadline = self._loop.time() + self._limits.unread_timeout_seconds

    def resume_writing(self) -> None:
        self.slow = False
        self.deadline = _NEVER if self._request is not None else self._loop.time() + self._limits.idle_timeout_seconds
        self._wake()
        if self._request is None and self._received:
            self._take_next()

    def write(self, data: bytes) -> None:
        """Part of the answer. To a client that has left, nothing is written: its handler is about to be cancelled."""
        self.begun = True
        if not self._transport.is_closing():  # uvloop's raises where asyncio's takes no notice
            self._transport.write(data)

    async def drained(self) -> None:
        """Return once the client has taken most of what was written."""
        while self.slow:
            await self._wait()

    def abort(self) -> None:
        """Hang up: what is not complete must not look complete."""
        self._transport.abort()

    def close(self) -> None:
        """Once the client has taken what was written."""
        self._transport.close()
        self.deadline = self._loop.time() + self._limits.unread_timeout_seconds

    async def read_body(self) -> bytes:
        """Of the present request. Raises ApiError."""
        framing = self._framing
        assert self._request is not None
        asked_for = framing is not None and self._body_error is None and self._expects(self._request)
        if asked_for and not self._transport.is_closing():
            self._transport.write(_CONTINUE)
        self._body_asked = True
        if framing is not None and self._body_error is None:
            self.deadline = self._loop.time() + self._limits.body_timeout_seconds
        self._resume_reading()
        while self._framing is not None and self._body_error is None:
            await self._wait()
        if self._body_error is not None:
            raise self._body_error
        body, self._body = bytes(self._body), bytearray()
        return body

    def _expects(self, request: ClientRequest) -> bool:
        """The client holds its body back until it is asked for."""
        return request.modern and b"expect" in request.fields and not self._body

    def expire(self) -> None:
        """The deadline is over: which one it was follows from what the connection is at."""
        if self.slow or self._lingering or self._transport.is_closing():
            self._transport.abort()
        elif self._framing is not None:
            pause = f"nothing of the request body came for {self._limits.body_timeout_seconds:g} s"
            self._fail_body(ApiError(408, "request_timeout", f"{pause}: send it again"))
        elif self._request is None and self._received:
            late = f"the request's head was not complete within {self._limits.head_timeout_seconds:g} s"
            self._refuse(ApiError(408, "request_timeout", f"{late}: send it again"))
        else:
            self.close()

    def _take_next(self) -> None:
        received, self._received = self._received, b""
        self._take_head(received)

    def _take_head(self, data: bytes) -> None:
        begun = len(self._received)
        received = self._received + data if begun else data
        if received.startswith(b"\r\n"):
            received = received[2:]  # some send one more line end behind a body
        end = received.find(b"\r\n\r\n", max(0, begun - 5))
        if (end if end >= 0 else len(received)) > self._limits.max_head_bytes:
            most = self._limits.max_head_bytes
            status = 431 if received.find(b"\r\n", 0, most) >= 0 else 414  # its first line alone is too long
            self._refuse(ApiError(status, "invalid_http", f"the request's head is longer than {most} bytes: send less"))
        elif end >= 0:
            self._begin(received[: end + 2], received[end + 4 :])
        elif not could_begin_head(received):
            self._refuse(_unreadable("its first line or a header has a control character"))
        elif self._half_closed:
            self.close()  # no more will come of it
        else:
            self._received = received
            if not begun and received:
                self.deadline = self._loop.time() + self._limits.head_timeout_seconds

    def _begin(self, head_bytes: bytes, rest: bytes) -> None:
        """A request: its head, and what came behind that."""
        try:
            head = parse_request_head(head_bytes)
            framing = body_of_request(head)
        except MalformedError as error:
            self._refuse(_unreadable(str(error)))
            return
        if len(head.headers) > _MOST_HEADERS:
            self._refuse(ApiError(431, "invalid_http", f"the request has more than {_MOST_HEADERS} headers: send less"))
            return
        request = ClientRequest(head, self)
        expects = head.fields.get(b"expect")
        if expects is not None and expects.lower() != b"100-continue":
            self._refuse(expectation_failed(), request.path)
            return
        self._request = request
        self._received = b""
        self.begun = False
        self._body_error = None
        self._body_asked = False
        if framing.length is not None and framing.length > self._limits.max_body_bytes:
            self._framing = framing
            self._fail_body(body_too_large(self._limits.max_body_bytes))
        elif framing.length == len(rest):
            request.body = rest  # as nearly always, it came with the head
            self.deadline = _NEVER
        else:
            self._framing = framing
            self._take_body(rest)
            if self._half_closed and self._framing is not None and self._body_error is None:
                self._fail_body(body_ended_early())
        self.task = self._loop.create_task(self._serve(request))

    def _take_body(self, data: bytes) -> None:
        framing = self._framing
        assert framing is not None
        if self._body_error is not None:
            return  # nobody wants it any more
        try:
            self._body += framing.feed(data)
        except MalformedError as error:
            self._fail_body(ApiError(400, "invalid_http", f"the request body cannot be read: {error}"))
            return
        if len(self._body) > self._limits.max_body_bytes:
            self._fail_body(body_too_large(self._limits.max_body_bytes))
        elif framing.complete:
            self._framing = None
            self._received = framing.rest
            self.deadline = _NEVER
            self._wake()
        elif self._body_asked:
            self.deadline = self._loop.time() + self._limits.body_timeout_seconds
        else:
            self.deadline = _NEVER  # the request may wait for its turn for longer than bodies may take
            if len(self._body) > _MOST_AHEAD:
                self._pause_reading()

    def _fail_body(self, error: ApiError) -> None:
        self._body_error = error
        self._body = bytearray()
        self.deadline = _NEVER
        self._wake()

    async def _serve(self, request: ClientRequest) -> None:
        try:
            response = await self._handle(request)
            if response is not None:
                self._answer(response, request)
        except asyncio.CancelledError:
            self._transport.abort()
        except ConnectionError:
            self._transport.abort()
        except Exception:
            _logger.exception("a request failed: %s", request.path)
            self._transport.abort()
        self._answered(request)

    def _answer(self, response: Response, request: ClientRequest) -> None:
        if self._framing is not None:
            request.persistent = False
        self.write(_as_bytes(response, request.method, request.persistent))

    def _answered(self, request: ClientRequest) -> None:
        self.task = self._request = None
        if self._transport.is_closing():
            return
        if self._framing is not None:
            self._linger()
        elif not request.persistent or (self._half_closed and not self._received):
            self.close()
        elif not self.slow:
            self.deadline = self._loop.time() + self._limits.idle_timeout_seconds
            self._resume_reading()
            if self._received:
                self._take_next()

    def _refuse(self, error: ApiError, path: str = "") -> None:
        """What cannot be a request, and nothing behind it can be understood."""
        _logger.info("a client was refused", extra=fields(status=error.status, reason=error.message))
        headers = list(error.headers().items())
        response = Response(error.status, error.body(dialect_of(path)), headers=headers)
        self._transport.write(_as_bytes(response, "", persistent=False))
        self._linger()

    def _linger(self) -> None:
        """Everything has been said: close once the client has, or soon."""
        self._received, self._framing, self._lingering = b"", None, True
        if self._half_closed:
            self.close()
            return
        if self._transport.can_write_eof():  # not under TLS
            self._transport.write_eof()
        self._resume_reading()
        self.deadline = self._loop.time() + _LINGER_SECONDS

    def _look_for_reset(self, waited_seconds: float) -> None:
        """Nobody reads from a connection whose other side is closed, so that nothing else would tell."""
        if self._transport.is_closing() or self.begun or self._request is None:
            return
        if self._transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
        else:
            wait_seconds = min(2 * waited_seconds, 1.0)
            self._loop.call_later(wait_seconds, self._look_for_reset, wait_seconds)

    def _pause_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if not self._reading and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _as_bytes(response: Response, method: str, persistent: bool) -> bytes:
    lines = [b"HTTP/1.1 %d %b" % (response.status, _REASONS.get(response.status, b""))]
    lines += [f"{name}: {value}".encode("latin-1", "replace") for name, value in response.headers]
    if response.status != 204:
        lines.append(b"Content-Type: %b\r\nContent-Length: %d" % (response.content_type.encode(), len(response.body)))
    if not persistent:
        lines.append(b"Connection: close")
    lines.append(b"\r\n")
    return b"\r\n".join(lines) + (b"" if method == "HEAD" else response.body)


def _unreadable(reason: str) -> ApiError:
    return ApiError(400, "invalid_http", f"the request cannot be read: {reason}")
