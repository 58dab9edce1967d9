"""Virtual time: events in the order of their time, and of their making where times are equal."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["VirtualClock"]


class VirtualClock:
    """`now` in seconds. It stands still while an event runs, and jumps to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._made = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        """`act(*arguments)` at that time; at once, behind what is due now, if it has passed."""
        heapq.heappush(self._events, (max(seconds, self.now), self._made, act, arguments))
        self._made += 1

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, act, arguments = heapq.heappop(self._events)
            act(*arguments)
