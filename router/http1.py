"""HTTP/1.1 answers of replicas, read strictly: heads and body framings. Pure: bytes in, bytes out, no I/O.

    head = parse_head(b"HTTP/1.1 200 OK\\r\\n...")         without its empty line
    body = body_of(head, method)                         framed by length, by chunks, or by the connection's end
    payload = body.feed(received)                        until `body.complete`

Whatever two readers could understand differently is refused with MalformedAnswerError: two lengths, a length beside
chunks, folded lines, stray line ends, unknown codings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Body", "Field", "Head", "MalformedAnswerError", "body_of", "frame", "parse_head"]

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([^\r\n]*))?")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")
_CONTROLS = bytes(byte for byte in range(32) if byte not in b"\t\r\n") + b"\x7f"
_LONGEST_LINE = 16_384
_MOST_TRAILERS = 100


class MalformedAnswerError(Exception):
    """Not HTTP, or ambiguous. The message says what is wrong and quotes nothing."""


class Field(NamedTuple):
    name: bytes
    """In lower case."""
    value: bytes
    line: bytes
    """As it came, without its line end."""


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    reason: bytes
    fields: list[Field]
    persistent: bool
    """The connection may be used again after this answer."""

    def get(self, name: bytes) -> bytes | None:
        """The first value of that (lower-case) name."""
        for field in self.fields:
            if field.name == name:
                return field.value
        return None

    def all(self, name: bytes) -> list[bytes]:
        return [field.value for field in self.fields if field.name == name]


def parse_head(received: bytes) -> Head:
    """Raises MalformedAnswerError."""
    lines = received.split(b"\r\n")
    status_line = _STATUS_LINE.fullmatch(lines[0])
    if status_line is None:
        raise MalformedAnswerError("no status line")
    stray = received.count(b"\r") + received.count(b"\n") != 2 * (len(lines) - 1)
    if stray or len(received.translate(None, _CONTROLS)) != len(received):
        raise MalformedAnswerError("a control character in its head")
    fields = []
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not _NAME.fullmatch(name):
            raise MalformedAnswerError("a line of its head is not a header")
        fields.append(Field(name.lower(), value.strip(b" \t"), line))
    head = Head(int(status_line[2]), status_line[3] or b"", fields, persistent=False)
    options = b",".join(head.all(b"connection")).lower()
    if status_line[1] == b"1" and b"close" not in options:
        return Head(head.status, head.reason, fields, persistent=True)
    return head


def body_of(head: Head, method: str) -> Body:
    """How the body is framed. Raises MalformedAnswerError."""
    if method == "HEAD" or head.status in (204, 304):
        return _Counted(0)
    codings, lengths = head.all(b"transfer-encoding"), set(head.all(b"content-length"))
    if codings:
        if [coding.lower() for coding in codings] != [b"chunked"] or lengths:
            raise MalformedAnswerError("its body is framed in two ways, or in an unknown one")
        return _Chunked()
    if not lengths:
        return _UntilClosed()
    length = lengths.pop()
    if lengths or not _LENGTH.fullmatch(length):
        raise MalformedAnswerError("its body has no single length")
    return _Counted(int(length))


def frame(payload: bytes) -> bytes:
    """One chunk. Never of nothing: that would be the last one."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


class Body:
    """A body on its way. `complete` once its last byte was fed; `excess` if more than the body was."""

    __slots__ = ("complete", "excess")

    def __init__(self) -> None:
        self.complete = False
        self.excess = False

    def feed(self, received: bytes) -> bytes:
        """The payload in what was received. Raises MalformedAnswerError."""
        raise NotImplementedError

    def end(self) -> None:
        """The connection has ended. That completes the body, or it never will be."""


class _Counted(Body):
    __slots__ = ("_left",)

    def __init__(self, length: int) -> None:
        super().__init__()
        self._left = length
        self.complete = not length

    def feed(self, received: bytes) -> bytes:
        left = self._left - len(received)
        if left > 0:
            self._left = left
            return received
        payload = received if not left else received[: self._left]
        self.excess = left < 0
        self._left = 0
        self.complete = True
        return payload


class _UntilClosed(Body):
    __slots__ = ()

    def feed(self, received: bytes) -> bytes:
        return received

    def end(self) -> None:
        self.complete = True


class _Chunked(Body):
    """Extensions and trailers are dropped."""

    __slots__ = ("_expected", "_left", "_rest", "_trailers")

    def __init__(self) -> None:
        super().__init__()
        self._rest = b""
        self._left = 0
        self._expected = "size"
        self._trailers = 0

    def feed(self, received: bytes) -> bytes:
        if self._rest:
            received = self._rest + received
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
                    raise MalformedAnswerError("a chunk without a size")
                break
            self._line(received[at:line_end])
            at = line_end + 2
        self._rest = received[at:]
        self.excess = self.complete and bool(self._rest)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _line(self, line: bytes) -> None:
        if self._expected == "end":  # of a chunk's data
            if line:
                raise MalformedAnswerError("a chunk longer than its size")
            self._expected = "size"
        elif self._expected == "size":
            size = _CHUNK_SIZE.fullmatch(line)
            if size is None:
                raise MalformedAnswerError("a chunk without a size")
            self._left = int(size[1], 16)
            self._expected = "end" if self._left else "trailer"
        elif not line:
            self.complete = True
        else:
            self._trailers += 1
            if self._trailers > _MOST_TRAILERS:
                raise MalformedAnswerError("trailers without end")
