"""Heads of HTTP/1.1 messages on both sides of the router, read strictly. Pure: bytes in, no I/O.

    head = parse_request_head(b"POST /v1/x HTTP/1.1\\r\\n...")      both without their empty line
    head = parse_head(b"HTTP/1.1 200 OK\\r\\n...")
    body = body_of(head, method)                         see `framing`

Whatever two readers could understand differently is refused with MalformedError: two lengths, a length beside chunks,
folded lines, stray line ends, unknown codings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from router.framing import Body, Chunked, Counted, MalformedError, UntilClosed

__all__ = [
    "Field",
    "Head",
    "RequestHead",
    "body_of",
    "body_of_request",
    "could_begin_head",
    "parse_head",
    "parse_request_head",
]

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]"
_TEXT = rb"[\t\x20-\x7e\x80-\xff]"
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] [1-9][0-9]{2}(?: |\r|\Z)")
_ANSWER = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: (%b*+))?((?:\r\n%b++:%b*+)*+)" % (_TEXT, _TOKEN, _TEXT))
_LINE = re.compile(rb"([^:\r\n]+):[ \t]*([^\r\n]*)")
_REQUEST = re.compile(rb"(%b{1,40}) ([!-~]+) HTTP/1\.([01])\r\n((?:%b++:%b*+\r\n)*+)" % (_TOKEN, _TOKEN, _TEXT))
_REQUEST_LINE = re.compile(rb"%b+ [^ ]+ HTTP/([0-9])\.([0-9])" % _TOKEN)
_ORIGIN_OF_TARGET = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)
_FIELD = re.compile(rb"([^:\r\n]+):[ \t]*([^\r\n]*)\r\n")
_STRAY = re.compile(rb"\0|(?<!\r)\n|\r(?!\n|\Z)")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CONTROLS = bytes(byte for byte in range(32) if byte not in b"\t\r\n") + b"\x7f"


Field = tuple[bytes, bytes]
"""Name and value."""


@dataclass(slots=True)
class RequestHead:
    method: str
    target: str
    """As it came, from its path on."""
    headers: list[Field]
    """Names and values as they came."""
    fields: dict[bytes, bytes]
    """The first value of each name, names in lower case."""
    modern: bool
    """HTTP/1.1, not 1.0."""
    persistent: bool
    """The client would keep the connection."""


def parse_request_head(received: bytes) -> RequestHead:
    """`received` ends with the line end of its last line. Raises MalformedError."""
    match = _REQUEST.fullmatch(received)
    if match is None:
        raise MalformedError(_what_is_wrong(received))
    method, target, minor, lines = match.groups()
    headers = _FIELD.findall(lines)
    fields = {name.lower(): value.rstrip(b" \t") for name, value in headers}
    if len(fields) != len(headers):
        _refuse_repetition(headers)
        fields = {name.lower(): value.rstrip(b" \t") for name, value in reversed(headers)}
    modern = minor == b"1"
    if modern and b"host" not in fields:
        raise MalformedError("it names no host")
    if not target.startswith(b"/") and target != b"*":
        origin = _ORIGIN_OF_TARGET.match(target)
        if origin is None:
            raise MalformedError("its target is not a path")
        target = target[origin.end() :]
        if not target.startswith(b"/"):
            target = b"/" + target
    if b"#" in target:
        raise MalformedError("its target has a fragment")
    option = fields.get(b"connection")
    persistent = modern if option is None else _persistent(headers, modern)
    return RequestHead(method.decode(), target.decode(), headers, fields, modern, persistent)


def could_begin_head(received: bytes) -> bool:
    """Whether more may make it a head. What has a stray line end or a NUL never will be one."""
    return _STRAY.search(received) is None


def body_of_request(head: RequestHead) -> Body:
    """How the body is framed; without length and chunks there is none. Raises MalformedError."""
    length, coding = head.fields.get(b"content-length"), head.fields.get(b"transfer-encoding")
    if coding is not None:
        if coding.lower() != b"chunked" or length is not None or not head.modern:
            raise MalformedError("its body is framed in two ways, or in an unknown one")
        return Chunked()
    if length is None:
        return Counted(0)
    if not _LENGTH.fullmatch(length):
        raise MalformedError("its body has no single length")
    return Counted(int(length))


_UNREPEATABLE = (b"content-length", b"transfer-encoding", b"host")


def _refuse_repetition(headers: list[Field]) -> None:
    names = [name.lower() for name, _ in headers]
    for name in _UNREPEATABLE:
        if names.count(name) > 1:
            raise MalformedError(f"it has two headers {name.decode()}")


def _persistent(headers: list[Field], modern: bool) -> bool:
    values = b",".join(value for name, value in headers if name.lower() == b"connection").lower()
    options = {option.strip() for option in values.split(b",")}
    return b"close" not in options if modern else b"keep-alive" in options


def _what_is_wrong(received: bytes) -> str:
    line, _, rest = received.partition(b"\r\n")
    request_line = _REQUEST_LINE.fullmatch(line)
    if request_line is None:
        return "its first line is not a request line"
    if request_line[1] != b"1" or request_line[2] not in b"01":
        return "it is of a version other than HTTP/1.1 and 1.0"
    if _STRAY.search(received) or len(received.translate(None, _CONTROLS)) != len(received):
        return "it has a control character"
    if rest[:1] in (b" ", b"\t") or b"\r\n " in rest or b"\r\n\t" in rest:
        return "it has a folded header"
    return "its target has a character that must be encoded, or a line is not a header"


class Head:
    """Of an answer."""

    __slots__ = ("_fields", "_first", "lines", "persistent", "reason", "status")

    def __init__(self, status: int, reason: bytes, lines: bytes, *, modern: bool) -> None:
        self.status = status
        self.reason = reason
        self.lines = lines
        """Of its headers, as they came, each behind a line end."""
        self._fields = [(name.lower(), value.rstrip(b" \t")) for name, value in _LINE.findall(lines)]
        self._first = dict(reversed(self._fields))
        options = b",".join(self.all(b"connection")).lower() if b"connection" in self._first else b""
        self.persistent = modern and b"close" not in options
        """The connection may be used again after this answer."""

    def get(self, name: bytes) -> bytes | None:
        """The first value of that (lower-case) name."""
        return self._first.get(name)

    def all(self, name: bytes) -> list[bytes]:
        return [value for other, value in self._fields if other == name] if name in self._first else []


def parse_head(received: bytes) -> Head:
    """Raises MalformedError."""
    match = _ANSWER.fullmatch(received)
    if match is None:
        raise MalformedError("it has no status line" if not _STATUS_LINE.match(received) else "its head is malformed")
    minor, status, reason, lines = match.groups()
    return Head(int(status), reason or b"", lines, modern=minor == b"1")


def body_of(head: Head, method: str) -> Body:
    """How the body is framed. Raises MalformedError."""
    if method == "HEAD" or head.status in (204, 304):
        return Counted(0)
    codings, lengths = head.all(b"transfer-encoding"), head.all(b"content-length")
    if codings:
        if [coding.lower() for coding in codings] != [b"chunked"] or lengths:
            raise MalformedError("its body is framed in two ways, or in an unknown one")
        return Chunked()
    if not lengths:
        return UntilClosed()
    if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
        raise MalformedError("its body has no single length")
    return Counted(int(lengths[0]))
