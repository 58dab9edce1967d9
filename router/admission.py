"""How many requests may be in flight. A permit lasts until the last byte has left and cannot leak."""

from __future__ import annotations

import asyncio

from shared.api import ApiError

__all__ = ["Admission"]

_RETRY_AFTER_SECONDS = 1.0


class Admission:
    """At most `max_in_flight` permits at a time."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._idle = asyncio.Event()
        self._idle.set()
        self.in_flight = 0
        self.closed = False
        """Shutting down: what is in flight goes on, nothing new begins."""

    def enter(self) -> None:
        """One more request, until `leave`. Raises ApiError 429 when the router is full, 503 when it is closed."""
        if self.closed:
            message = "this router is shutting down: retry, another one may answer"
            raise ApiError(503, "shutting_down", message, retry_after_seconds=_RETRY_AFTER_SECONDS)
        if self.in_flight >= self._max_in_flight:
            message = f"{self._max_in_flight} requests are in flight, the most this router takes: retry in a while"
            raise ApiError(429, "too_many_requests", message, retry_after_seconds=_RETRY_AFTER_SECONDS)
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    async def idle(self) -> None:
        """Return once nothing is in flight."""
        await self._idle.wait()
