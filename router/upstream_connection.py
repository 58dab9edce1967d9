"""One keep-alive connection to a replica, and the answer that is coming in on it. See `upstream`.

idle --send--> head --> body --> complete --> idle again, back in its pool
                 `--------`-- broken, late, malformed, cut --> failed, never used again
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Literal, cast

from router.framing import Body, MalformedError
from router.http1 import Head, body_of, parse_head

__all__ = ["Connection", "ConnectionPool", "UpstreamError", "UpstreamResponse"]

_LONGEST_HEAD = 65_536
_MOST_BUFFERED = 262_144
"""Bytes that have come and nobody has taken, before no more are read."""

_MOST_JOINED = 65_536

Failure = Literal["unreachable", "broken", "timeout", "overdue", "lost", "cut", "exhausted"]
"""`timeout`: nothing came for too long; `overdue`: the request's own time is over, though something may be coming."""

Sink = Callable[[bytes], bool]
"""Takes what has come; False: no more for now."""


class UpstreamError(Exception):
    """`failure` says how; the message is for people and names no secrets."""

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure
        self.sent = True
        """The replica may have the whole request, and may have executed it."""


class ConnectionPool:
    """All open connections to one place, and which of them are idle, longest idle first."""

    __slots__ = ("closed", "idle", "open")

    def __init__(self) -> None:
        self.idle: list[Connection] = []
        self.open: set[Connection] = set()
        self.closed = False
        """Nothing is sent there any more: what is under way ends, and no connection is kept."""

    def lose(self) -> None:
        """The place is gone: whoever waits there for a first byte is told at once."""
        for connection in list(self.open):
            connection.lose()

    def cut(self) -> None:
        for connection in list(self.open):
            connection.cut()

    def expire(self, now: float, idle_since: float) -> None:
        """Give up the answers that are late, and connections that have been idle since then."""
        for connection in [connection for connection in self.open if connection.late(now, idle_since)]:
            connection.expire(now)

    def abort(self) -> None:
        for connection in list(self.open):
            connection.abort()


class Connection(asyncio.Protocol):
    """Belongs to one answer at a time, and to `pool` for as long as it is open."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: ConnectionPool) -> None:
        self.loop = loop
        self.idle_since = math.inf
        self._pool = pool
        self._response: UpstreamResponse | None = None
        self._transport: asyncio.Transport

    @property
    def usable(self) -> bool:
        return not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.open.add(self)

    def send(self, response: UpstreamResponse, head: bytes, body: bytes) -> None:
        """Raises UpstreamError where the connection is no more, and nobody would tell `response`."""
        if not self.usable:
            raise UpstreamError("broken", "it hung up before it was asked")
        self._response = response
        if len(body) <= _MOST_JOINED:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    def data_received(self, data: bytes) -> None:
        if self._response is None:
            self.abort()  # nobody asked
        else:
            self._response.received(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.open.discard(self)
        self._leave_pool()
        if self._response is not None:
            self._response.lost(error)

    def late(self, now: float, idle_since: float) -> bool:
        response = self._response
        return response.late(now) if response is not None else self.idle_since <= idle_since

    def expire(self, now: float) -> None:
        if self._response is None:
            self.abort()
        else:
            self._response.expire(now)

    def pause(self) -> None:
        self._transport.pause_reading()

    def resume(self) -> None:
        self._transport.resume_reading()

    def release(self) -> None:
        """The answer is complete and the connection good for another."""
        if self._pool.closed:
            self.abort()
            return
        self._response = None
        self.idle_since = self.loop.time()
        self._pool.idle.append(self)

    def lose(self) -> None:
        if self._response is None:
            self.abort()
        elif not self._response.begun_body:
            self._response.lose()

    def cut(self) -> None:
        if self._response is not None:
            self._response.cut()

    def abort(self) -> None:
        self._response = None
        self._leave_pool()
        self._transport.abort()

    def _leave_pool(self) -> None:
        if self in self._pool.idle:
            self._pool.idle.remove(self)


class UpstreamResponse:
    """An answer on its way. One task waits for it; what comes is kept for that task, or forwarded at once."""

    def __init__(
        self,
        connection: Connection,
        method: str,
        first_byte_timeout_seconds: float,
        chunk_timeout_seconds: float,
        request_timeout_seconds: float,
    ) -> None:
        self._connection: Connection | None = connection
        self._loop = connection.loop
        self._method = method
        self._chunk_timeout_seconds = chunk_timeout_seconds
        # Some engines send the head at once and the first byte after the prefill: each may take that long.
        self._timeout_seconds = first_byte_timeout_seconds
        now = self._loop.time()
        self._deadline = now + first_byte_timeout_seconds
        """By when something must have come."""
        self._last_deadline = now + request_timeout_seconds
        """By when all must have come."""
        self.begun_body = False
        """A byte of the answer itself has come."""
        self._waiter: asyncio.Future[None] | None = None
        self._head_bytes = b""
        self._body: Body | None = None
        self._buffered: list[bytes] = []
        self._buffered_bytes = 0
        self._sink: Sink | None = None
        self._paused = False
        self._error: UpstreamError | None = None
        self.unanswered = True
        """Not a byte has come."""
        self.head: Head

    @property
    def status(self) -> int:
        return self.head.status

    @property
    def complete(self) -> bool:
        """All of the answer has come."""
        return self._body is not None and self._body.complete

    async def begun(self) -> None:
        """Return once `head` is there."""
        while self._body is None:
            await self._wait()

    async def read(self) -> bytes:
        """What has come since the last read, waiting for it if it is nothing; empty at the end of the answer."""
        while not self._buffered:
            if self.complete:
                return b""
            await self._wait()
        chunk = self._buffered[0] if len(self._buffered) == 1 else b"".join(self._buffered)
        self._buffered.clear()
        self._buffered_bytes = 0
        self._resume()
        return chunk

    def forward(self, sink: Sink) -> None:
        """Hand everything to `sink` from now on, as it comes."""
        self._sink = sink
        for chunk in self._buffered:
            if not sink(chunk):
                self._pause()
        self._buffered.clear()

    async def progress(self) -> bool:
        """Wait until the answer is complete (True), or the sink wants no more for now (False): then `resume`."""
        while not self.complete:
            if self._paused:
                return False
            await self._wait()
        return True

    def resume(self) -> None:
        """The sink takes more."""
        self._resume()

    def cut(self) -> None:
        """Hang up while another task waits: it gets UpstreamError, `cut`."""
        self._fail("cut", "it was cut off")

    def lose(self) -> None:
        """The replica is known to be gone, though its connection does not say so."""
        self._fail("lost", "it left the fleet before it answered")

    def close(self) -> None:
        """Hang up, unless the answer is complete; then the connection is already back in the pool."""
        self._sink = None
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    def received(self, data: bytes) -> None:
        """Called by the connection."""
        self.unanswered = False
        try:
            body = self._body
            if body is None:
                body, data = self._read_head(data)
            if body is not None:
                self._take(body, data)
        except MalformedError as error:
            self._fail("broken", f"its answer is malformed: {error}")

    def lost(self, error: Exception | None) -> None:
        """Called by the connection."""
        self._connection = None
        if self._body is not None and error is None:
            self._body.end()
            if self._body.complete:
                self._finished()
                return
        when = "before answering" if self._body is None else "in the middle of its answer"
        self._fail("broken", f"it broke off {when}")

    def _read_head(self, data: bytes) -> tuple[Body | None, bytes]:
        """The body that the head announces, once that is there, and its first bytes."""
        received = self._head_bytes + data if self._head_bytes else data
        while 0 <= (end := received.find(b"\r\n\r\n")) <= _LONGEST_HEAD:
            head = parse_head(received[:end])
            received = received[end + 4 :]
            if head.status >= 200:
                self.head = head
                self._body = body_of(head, self._method)
                self._head_bytes = b""
                self._deadline = self._loop.time() + self._timeout_seconds
                self._wake()
                return self._body, received
            if head.status == 101:
                raise MalformedError("it switches protocols unasked")
        if len(received) > _LONGEST_HEAD:
            raise MalformedError(f"its head is longer than {_LONGEST_HEAD} bytes")
        self._head_bytes = received
        return None, b""

    def _take(self, body: Body, data: bytes) -> None:
        payload = body.feed(data)
        if payload:
            self._deadline = self._loop.time() + self._chunk_timeout_seconds
            if not self.begun_body:
                self.begun_body = True
                self._timeout_seconds = self._chunk_timeout_seconds
            if self._sink is not None:
                if not self._sink(payload):
                    self._pause()
            else:
                self._buffered.append(payload)
                self._buffered_bytes += len(payload)
                if self._buffered_bytes > _MOST_BUFFERED:
                    self._pause()
                self._wake()
        if body.complete:
            self._finished()

    def _finished(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if self._paused:
                connection.resume()
                self._paused = False
            if self.head.persistent and self._body is not None and not self._body.rest:
                connection.release()
            else:
                connection.abort()
        self._wake()

    def _fail(self, failure: Failure, message: str) -> None:
        if self._error is None and not self.complete:
            self._error = UpstreamError(failure, message)
        self.close()
        self._wake()

    def late(self, now: float) -> bool:
        return now >= self._deadline or now >= self._last_deadline

    def expire(self, now: float) -> None:
        """Called by the sweep when it is late."""
        if now >= self._last_deadline:
            self._fail("overdue", "its answer took longer than requests may")
        elif self._paused:  # nothing can come, and it is not the replica's fault
            self._deadline = now + self._timeout_seconds
        elif self._body is None:
            self._fail("timeout", f"its answer did not begin within {self._timeout_seconds:g} s")
        else:
            self._fail("timeout", f"it sent nothing for {self._timeout_seconds:g} s")

    def _pause(self) -> None:
        if not self._paused and self._connection is not None:
            self._paused = True
            self._connection.pause()
            self._wake()

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._deadline = self._loop.time() + self._timeout_seconds
            if self._connection is not None:
                self._connection.resume()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
