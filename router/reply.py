"""A replica's answer on its way to the client, written straight to the client's connection.

Head and first bytes leave together. What the replica frames by chunks, or by hanging up, is framed by chunks here (for
HTTP/1.0 by hanging up); a length stays a length.
"""

from __future__ import annotations

from router.client_request import ClientRequest
from router.framing import frame
from router.http1 import Head

__all__ = ["Reply"]

_BODILESS = (204, 304)


class Reply:
    """The answer to `request`."""

    __slots__ = ("_bodiless", "_chunked_here", "_connection", "_has_length", "_lines", "_request")

    def __init__(self, request: ClientRequest, head: Head, headers: bytes) -> None:
        """`headers` are whole lines."""
        self._request = request
        self._connection = request.connection
        self._bodiless = request.method == "HEAD" or head.status in _BODILESS
        self._has_length = head.get(b"content-length") is not None
        self._chunked_here = False
        self._lines = b"HTTP/1.1 %d %b\r\n%b" % (head.status, head.reason, headers)

    @property
    def takes_events(self) -> bool:
        """Something may be added to its end."""
        return not self._has_length and not self._bodiless

    def send_whole(self, body: bytes) -> None:
        if not self._has_length and not self._bodiless:
            self._lines += b"Content-Length: %d\r\n" % len(body)
        self._connection.write(self._head() + (b"" if self._bodiless else body))

    def begin(self, first: bytes) -> None:
        """The head, and the first bytes of a body of which more will come."""
        if not self._has_length and not self._bodiless:
            if self._request.modern:
                self._chunked_here = True
                self._lines += b"Transfer-Encoding: chunked\r\n"
            else:
                self._request.persistent = False
        self._connection.write(self._head() + self._framed(first))

    def pass_on(self, payload: bytes) -> bool:
        """False: the client is slow; write no more until its connection has drained."""
        connection = self._connection
        if not self._bodiless and payload:
            connection.write(frame(payload) if self._chunked_here else payload)
        return not connection.slow

    def end(self) -> None:
        if self._chunked_here:
            self._connection.write(b"0\r\n\r\n")

    def abort(self) -> None:
        """What is not complete must not look complete."""
        self._connection.abort()

    def _framed(self, payload: bytes) -> bytes:
        if self._bodiless or not payload:
            return b""
        return frame(payload) if self._chunked_here else payload

    def _head(self) -> bytes:
        return self._lines + (b"\r\n" if self._request.persistent else b"Connection: close\r\n\r\n")
