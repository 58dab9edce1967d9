"""Bodies of HTTP/1.1 messages, framed by length, by chunks, or by the connection's end, read strictly. No I/O.

payload = body.feed(received)                        until `body.complete`
"""

from __future__ import annotations

import re

__all__ = ["Body", "Chunked", "Counted", "MalformedError", "UntilClosed", "frame"]

_LINE = rb"[\t\x20-\x7e\x80-\xff]*"
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;%b)?" % _LINE)
_TRAILER = re.compile(rb"[!#$%%&'*+.^_`|~0-9A-Za-z-]+:%b" % _LINE)
_LONGEST_LINE = 16_384
_MOST_TRAILERS = 100


class MalformedError(Exception):
    """Not HTTP, or ambiguous. The message says what is wrong and quotes nothing."""


def frame(payload: bytes) -> bytes:
    """One chunk. Never of nothing: that would be the last one."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


class Body:
    """A body on its way. `complete` once its last byte was fed; `rest` is what was fed behind it."""

    __slots__ = ("complete", "length", "rest")

    def __init__(self, length: int | None = None) -> None:
        self.length = length
        """In bytes, where it was announced."""
        self.complete = False
        self.rest = b""

    def feed(self, received: bytes) -> bytes:
        """The payload in what was received. Raises MalformedError."""
        raise NotImplementedError

    def end(self) -> None:
        """The connection has ended. That completes the body, or it never will be."""


class Counted(Body):
    __slots__ = ("_left",)

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self._left = length
        self.complete = not length

    def feed(self, received: bytes) -> bytes:
        left = self._left - len(received)
        if left > 0:
            self._left = left
            return received
        payload = received
        if left < 0:
            payload, self.rest = received[: self._left], received[self._left :]
        self._left = 0
        self.complete = True
        return payload


class UntilClosed(Body):
    __slots__ = ()

    def feed(self, received: bytes) -> bytes:
        return received

    def end(self) -> None:
        self.complete = True


class Chunked(Body):
    """Extensions and trailers are dropped."""

    __slots__ = ("_begun", "_expected", "_left", "_trailers")

    def __init__(self) -> None:
        super().__init__()
        self._begun = b""
        """A line of which more must come."""
        self._left = 0
        self._expected = "size"
        self._trailers = 0

    def feed(self, received: bytes) -> bytes:
        if self._begun:
            received = self._begun + received
        pieces = []
        at = 0
        while not self.complete:
            if self._left:
                piece = received[at : at + self._left]
                if not piece:
                    break
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                continue
            line_end = received.find(b"\r\n", at)
            if line_end < 0:
                if len(received) - at > _LONGEST_LINE:
                    raise MalformedError("a chunk without a size")
                break
            self._line(received[at:line_end])
            at = line_end + 2
        if self.complete:
            self._begun, self.rest = b"", received[at:]
        else:
            self._begun = received[at:]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _line(self, line: bytes) -> None:
        if self._expected == "end":  # of a chunk's data
            if line:
                raise MalformedError("a chunk longer than its size")
            self._expected = "size"
        elif self._expected == "size":
            size = _CHUNK_SIZE.fullmatch(line)
            if size is None:
                raise MalformedError("a chunk without a size")
            self._left = int(size[1], 16)
            self._expected = "end" if self._left else "trailer"
        elif not line:
            self.complete = True
        else:
            self._trailers += 1
            if self._trailers > _MOST_TRAILERS or not _TRAILER.fullmatch(line):
                raise MalformedError("its trailers are none, or without end")
