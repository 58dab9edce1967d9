"""One request to one replica, streamed back as it comes: the narrow seam between the proxy and whatever carries bytes.

    response = await upstream.open("POST", url, "/v1/x", headers, body)     status and headers are there
    while chunk := await response.read(): ...                 bytes exactly as sent, whatever their encoding; or
    response.forward(sink); await response.progress()         each handed to `sink` the moment it comes
    response.close()                                          always; before the end it hangs up at once

A pooled connection that turns out to be dead the moment it is used is no fault of the replica: the request is sent once
more there, on a fresh one. Everything else raises UpstreamError.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from router.upstream_connection import Connection, ConnectionPool, UpstreamError, UpstreamResponse

__all__ = ["Upstream", "UpstreamError", "UpstreamResponse"]

# Below the 5 s after which common servers close an idle connection.
_IDLE_SECONDS = 4.0
_STALE_SECONDS = 1.0
"""Who hung up before it was asked is found out within a round trip; later it is one that dies while it computes."""
_SWEEP_SECONDS = 0.1
"""How late an answer may be found to be late."""
_MOST_ORIGINS = 4096
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)
"""Said of this machine, not of the replica."""


class _Origin(NamedTuple):
    host: str
    port: int
    tls: bool
    host_line: bytes
    path: str
    """Before every target: a replica may live under a prefix."""


class Upstream:
    """A pool of connections to all replicas. Use as an async context manager."""

    def __init__(
        self,
        *,
        connect_timeout_seconds: float,
        first_byte_timeout_seconds: float,
        chunk_timeout_seconds: float,
        request_timeout_seconds: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`tls` is for `https://` replicas; by default the system's authorities are believed."""
        self._connect_timeout_seconds = connect_timeout_seconds
        self._first_byte_timeout_seconds = first_byte_timeout_seconds
        self._chunk_timeout_seconds = chunk_timeout_seconds
        self._request_timeout_seconds = request_timeout_seconds
        self._pools: defaultdict[_Origin, ConnectionPool] = defaultdict(ConnectionPool)
        self._leaving: list[ConnectionPool] = []
        """Of places that are gone, where answers may still be on their way."""
        self._cut_off = False
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop
        self._sweep: asyncio.TimerHandle

    async def __aenter__(self) -> Upstream:
        self._loop = asyncio.get_running_loop()
        self._sweep = self._loop.call_later(_SWEEP_SECONDS, self._look_at_deadlines)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sweep.cancel()
        for pool in (*self._pools.values(), *self._leaving):
            pool.abort()
        await asyncio.sleep(0)  # until they have heard of it

    def retain(self, base_urls: Iterable[str]) -> None:
        """These are all the places there are. Whoever waits elsewhere for a first byte gets UpstreamError, `lost`."""
        there = {_origin(base_url) for base_url in base_urls}
        for origin in [origin for origin in self._pools if origin not in there]:
            pool = self._pools.pop(origin)
            pool.closed = True
            pool.lose()
            self._leaving.append(pool)

    def lose(self, base_url: str) -> None:
        """Nobody answers there: the same for one place, which may come back."""
        self._pools[_origin(base_url)].lose()

    def cut_off(self) -> None:
        """Nothing more is asked or read: whoever waits for an answer, or for more of it, gets UpstreamError, `cut`."""
        self._cut_off = True
        for pool in (*self._pools.values(), *self._leaving):
            pool.cut()

    async def open(
        self,
        method: str,
        base_url: str,
        target: str,
        headers: bytes,
        body: bytes,
        timeout_seconds: float | None = None,
        ends_within_seconds: float | None = None,
    ) -> UpstreamResponse:
        """Send the request and wait for the head of the answer, whose last byte must come within the time given.

        `target` is taken as it stands, encoded; `headers` are whole lines, but for `Host` and `Content-Length`.
        """
        origin = _origin(base_url)
        length = b"" if not body and method in ("GET", "HEAD") else b"Content-Length: %d\r\n" % len(body)
        head = b"%b %b HTTP/1.1\r\n%b%b%b\r\n" % (
            method.encode(),
            (origin.path + target).encode(),
            origin.host_line,
            headers,
            length,
        )
        asked_at = self._loop.time()
        ends_at = asked_at + (ends_within_seconds or self._request_timeout_seconds)
        limit = min(timeout_seconds or self._first_byte_timeout_seconds, ends_at - asked_at)
        sent = False
        for connection in (self._pooled(origin), None):
            reused = connection is not None
            response: UpstreamResponse | None = None
            try:
                if connection is None:
                    connection = await self._connect(origin, limit)
                if self._cut_off:
                    connection.abort()
                    raise UpstreamError("cut", "nothing is asked any more")
                now = self._loop.time()
                response = UpstreamResponse(connection, method, limit, self._chunk_timeout_seconds, ends_at - now)
                connection.send(response, head, body)
                sent = True
                await response.begun()
            except UpstreamError as error:
                stale = reused and error.failure == "broken" and self._loop.time() - asked_at < _STALE_SECONDS
                if response is not None:
                    response.close()
                    if stale and response.unanswered:
                        continue
                error.sent = sent
                raise
            except BaseException:
                if response is not None:
                    response.close()
                raise
            return response
        raise AssertionError("a fresh connection answers or raises")

    def _pooled(self, origin: _Origin) -> Connection | None:
        idle = self._pools[origin].idle
        oldest = self._loop.time() - _IDLE_SECONDS
        while idle:
            connection = idle.pop()
            if connection.usable and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: _Origin, limit_seconds: float) -> Connection:
        def connection() -> Connection:
            return Connection(self._loop, pool)

        pool = self._pools[origin]
        try:
            async with asyncio.timeout(min(limit_seconds, self._connect_timeout_seconds)):
                _, connected = await self._loop.create_connection(
                    connection, origin.host, origin.port, ssl=self._tls_context() if origin.tls else None
                )
                return connected
        except TimeoutError:
            raise UpstreamError("unreachable", "it could not be reached in time") from None
        except ssl.SSLCertVerificationError as error:
            message = f"its certificate is not believed ({error.verify_message}): see --tls-ca"
            raise UpstreamError("unreachable", message) from None
        except (OSError, UnicodeError) as error:
            if isinstance(error, OSError) and error.errno in _EXHAUSTED:
                raise UpstreamError("exhausted", f"the router has no connections left ({error.strerror})") from None
            raise UpstreamError("unreachable", f"it cannot be reached ({type(error).__name__})") from None

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def _look_at_deadlines(self) -> None:
        self._sweep = self._loop.call_later(_SWEEP_SECONDS, self._look_at_deadlines)  # first: no fault below may end it
        now = self._loop.time()
        for pool in (*self._pools.values(), *self._leaving):
            pool.expire(now, now - _IDLE_SECONDS)
        self._leaving = [pool for pool in self._leaving if pool.open]


@lru_cache(_MOST_ORIGINS)
def _origin(base_url: str) -> _Origin:
    parts = urlsplit(base_url)
    tls = parts.scheme == "https"
    host_line = f"Host: {parts.netloc.rpartition('@')[2]}\r\n".encode()
    return _Origin(parts.hostname or "", parts.port or (443 if tls else 80), tls, host_line, parts.path.rstrip("/"))
