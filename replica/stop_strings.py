"""Cuts an answer at its stop strings, exactly, however the text comes in pieces.

    text so far   "... the end\\nUs"          stop string "\\nUser:"
                   [ released ][held]          the held part may still become a stop string, so nobody has seen it

Of several stop strings the one that is complete first wins, so the cut does not depend on where pieces end.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Cut", "StopStrings"]


class Cut(NamedTuple):
    """`text` may be shown; `matched` is the stop string found, and then nothing comes after."""

    text: str
    matched: str | None


class StopStrings:
    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, piece: str) -> Cut:
        if not self._stops:
            return Cut(piece, None)
        text = self._held + piece
        # Ordered by (end, start): the one that single characters would complete first, and of those the longest.
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            self._held = ""
            return Cut(text[:start], stop)
        held = max(_unfinished(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return Cut(text[: len(text) - held], None)

    def flush(self) -> str:
        """The answer ended otherwise: what was held is plain text."""
        held, self._held = self._held, ""
        return held


def _unfinished(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
