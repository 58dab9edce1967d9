"""A replica's answer on its way to the client, written straight to the client's connection.

Head and first bytes leave together. What the replica frames by chunks, or by hanging up, is framed by chunks here (for
HTTP/1.0 by hanging up); a length stays a length.
"""

from __future__ import annotations

from aiohttp import HttpVersion11, web

from router.http1 import Head, frame

__all__ = ["Reply"]

_MOST_UNSENT_BYTES = 65_536
_BODILESS = (204, 304)


class Reply(web.StreamResponse):
    """To aiohttp a response that has been sent already, whatever `prepare` and `write_eof` are asked to do."""

    def __init__(self, request: web.BaseRequest, head: Head, headers: bytes) -> None:
        """`headers` are whole lines. Raises ConnectionResetError when the client is gone."""
        super().__init__(status=head.status)
        if request.transport is None:
            raise ConnectionResetError("the client is gone")
        self._transport = request.transport
        self._writer = request.writer
        self._bodiless = request.method == "HEAD" or head.status in _BODILESS
        self._has_length = head.get(b"content-length") is not None
        self._chunked_here = False
        self._modern = request.version >= HttpVersion11
        self._stays_open = self._modern and request.keep_alive
        self._lines = b"HTTP/1.1 %d %b\r\n%b" % (head.status, head.reason, headers)

    @property
    def keep_alive(self) -> bool:
        return self._stays_open

    @property
    def takes_events(self) -> bool:
        """Something may be added to its end."""
        return not self._has_length and not self._bodiless

    def send_whole(self, body: bytes) -> None:
        if not self._has_length and not self._bodiless:
            self._lines += b"Content-Length: %d\r\n" % len(body)
        self._transport.write(self._head() + (b"" if self._bodiless else body))

    def begin(self, first: bytes) -> None:
        """The head, and the first bytes of a body of which more will come."""
        if not self._has_length and not self._bodiless:
            if self._modern:
                self._chunked_here = True
                self._lines += b"Transfer-Encoding: chunked\r\n"
            else:
                self._stays_open = False
        self._transport.write(self._head() + self._framed(first))

    def pass_on(self, payload: bytes) -> bool:
        """False: the client is slow; write no more until `drained`."""
        if self._transport.is_closing():
            return True  # it has left, and whoever serves it is about to be told
        self._transport.write(self._framed(payload))
        return self._transport.get_write_buffer_size() < _MOST_UNSENT_BYTES

    async def drained(self) -> None:
        """Return once the client has taken most of what was written."""
        await self._writer.drain()

    def end(self) -> None:
        if self._chunked_here and not self._transport.is_closing():
            self._transport.write(b"0\r\n\r\n")

    def abort(self) -> None:
        """What is not complete must not look complete."""
        self._stays_open = False
        self._transport.abort()

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing is left to do."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to do."""

    def _framed(self, payload: bytes) -> bytes:
        if self._bodiless or not payload:
            return b""
        return frame(payload) if self._chunked_here else payload

    def _head(self) -> bytes:
        return self._lines + (b"\r\n" if self._stays_open else b"Connection: close\r\n\r\n")
