"""Server-sent events out of bytes that come in pieces of any size."""

from __future__ import annotations

__all__ = ["EventTooLongError", "SseParser"]

_MAX_EVENT_BYTES = 16 << 20


class EventTooLongError(Exception):
    """The server sends an event without end."""


class SseParser:
    """Feed it whatever arrived; it answers with the data of the events that are now complete.

    A line may end in LF, CR or CR LF, and a piece may end anywhere, inside CR LF and inside a character too.
    """

    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []
        self._bytes = 0
        self._after_return = False

    def feed(self, piece: bytes) -> list[str]:
        if not piece:
            return []
        # A CR at the end of a piece has ended its line; an LF that follows belongs to it.
        rest = piece[1:] if self._after_return and piece.startswith(b"\n") else piece
        self._after_return = piece.endswith(b"\r")
        lines = (self._line + rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n")).split(b"\n")
        self._line = lines.pop()
        if self._bytes + len(self._line) > _MAX_EVENT_BYTES:
            raise EventTooLongError(f"An event of more than {_MAX_EVENT_BYTES} bytes.")
        return [event for line in lines if (event := self._take(line)) is not None]

    def _take(self, line: bytes) -> str | None:
        if not line:
            data, self._data, self._bytes = self._data, [], 0
            return b"\n".join(data).decode(errors="replace") if data else None
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            self._bytes += len(value)
        return None
