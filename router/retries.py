"""Whether a request that was sent to a replica, and failed before the first byte, may go to another one.

    refused (503)                   always: it was not executed
    sent, and then a break, a 502   what only reads or generates: to do that twice changes nothing and costs computing
    or the replica left the fleet   alone; other POSTs may have had an effect, and are not repeated unless allowed
    no answer in time               never: its time is over

And only within a budget, so that a sick fleet is not asked several times for everything it fails: a bucket that fills
by a share of the requests that arrive and by a few tokens a second, and loses one with every retry. Moving on from a
replica that left the fleet costs nothing: the work that waited there has gone with it. Nor does one that could not be
reached, to which nothing was sent; that is not asked here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from shared.api import COUNT_TOKENS_PATH, GENERATION_PATHS

__all__ = ["Failing", "Retries"]

Failing = Literal["refused", "unanswered", "lost"]
"""How far the attempt came: `lost` is `unanswered` by a replica that left the fleet."""

_FLOOR_PER_SECOND = 2.0
_MOST_TOKENS = 200.0
"""Enough for all that waits at a replica that dies; no more, or a long good time would pay for a long storm."""
_READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_REPEATABLE_PATHS = frozenset({*GENERATION_PATHS, COUNT_TOKENS_PATH, "/tokenize"})


class Retries:
    """`unanswered` says which requests that may have been executed are sent again: none, generation or all."""

    def __init__(self, budget: float, unanswered: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`budget` is retries per request, in the long run."""
        self._budget = budget
        self._unanswered = unanswered
        self._clock = clock
        self._tokens = _MOST_TOKENS
        self._filled_seconds = clock()
        self.denied = 0
        """For want of budget."""

    def arrived(self) -> None:
        """A request, which may be retried and pays for others that are."""
        self._tokens += self._budget

    def allows(self, failing: Failing, method: str, path: str) -> bool:
        """Take one retry out of the budget; False where it must not or cannot be."""
        if failing in ("unanswered", "lost") and not self._may_repeat(method, path):
            return False
        if failing == "lost":
            return True
        self._fill()
        if self._tokens < 1.0:
            self.denied += 1
            return False
        self._tokens -= 1.0
        return True

    def _may_repeat(self, method: str, path: str) -> bool:
        if self._unanswered == "generation":
            return method in _READING_METHODS or (method == "POST" and path in _REPEATABLE_PATHS)
        return self._unanswered == "all" or method in _READING_METHODS

    def _fill(self) -> None:
        now = self._clock()
        gained = _FLOOR_PER_SECOND * (now - self._filled_seconds)
        self._tokens = min(_MOST_TOKENS, self._tokens + gained)
        self._filled_seconds = now
