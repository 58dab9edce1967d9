"""How many requests are in flight at once, and who waits for a place.

    arrival --free--> in flight --last byte--> its place goes to whoever's turn it is (see `fair_queue`)
       `----full---> waiting ----^   429 where too many wait, 503 after too long, and at once when the router closes

A permit lasts until the last byte has left. Whoever is cancelled while waiting leaves the line at once; whoever is
cancelled with a permit just granted hands it on. Where the line is full, a tenant that takes less of it than its share
pushes out the last of the one that takes most: no tenant can keep the others out by filling the line.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from router.exchange import router_shutting_down
from router.fair_queue import FairQueue
from shared.api import ApiError

__all__ = ["Admission"]

_LONGEST_RETRY_AFTER_SECONDS = 60.0
_GAP_SMOOTHING = 0.1
"""Weight of the latest in the mean time between two permits given back."""

_Turn = asyncio.Future[None]


class Admission:
    """At most `max_in_flight` permits at a time, and at most `max_queue` requests that wait for one."""

    def __init__(
        self,
        max_in_flight: int,
        max_queue: int = 0,
        max_queue_seconds: float = 30.0,
        weight_of: Callable[[str], float] = lambda tenant: 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_in_flight = max_in_flight
        self._max_queue = max_queue
        self._max_queue_seconds = max_queue_seconds
        self._weight_of = weight_of
        self._clock = clock
        self._line: FairQueue[_Turn] = FairQueue()
        self._expiries: OrderedDict[_Turn, float] = OrderedDict()
        """By arrival, and so, as all may wait equally long, by when they have waited too long."""
        self._timer: asyncio.TimerHandle | None = None
        self._gap_seconds = 0.0
        self._gap_began = 0.0
        """When a permit was last given back while the router was full, or since when it is full."""
        self._idle = asyncio.Event()
        self.in_flight = 0
        self.closed = False
        """Shutting down: what is in flight goes on, nothing new begins."""

    @property
    def queued(self) -> int:
        return len(self._line)

    def try_enter(self) -> bool:
        """One more request, until `leave`; False where it must `wait` for that."""
        if self.closed or self.in_flight == self._max_in_flight:
            return False
        self.in_flight += 1
        if self.in_flight == self._max_in_flight:
            self._gap_began = self._clock()
        return True

    async def wait(self, tenant: str = "") -> None:
        """For a permit, until `leave`. Raises ApiError 429 where too many wait, 503 after too long or when closed."""
        turn = self._line_up(tenant)
        try:
            await turn
        except asyncio.CancelledError:
            if turn in self._line:
                self._forget(turn)
            elif not turn.cancelled() and turn.exception() is None:
                self.leave()
            raise

    def leave(self) -> None:
        """Give a permit back: to the next in line, if there is one."""
        if self.in_flight == self._max_in_flight:
            self._measure_gap()
            while self._line:
                turn = self._line.pop()
                del self._expiries[turn]
                if not turn.done():  # else its task is about to hear that it is cancelled
                    turn.set_result(None)
                    return
        self.in_flight -= 1
        if self.closed and not self.in_flight:
            self._idle.set()

    @asynccontextmanager
    async def permit(self, tenant: str = "") -> AsyncIterator[None]:
        """Within it, a request is in flight. Raises ApiError as `wait` does."""
        if not self.try_enter():
            await self.wait(tenant)
        try:
            yield
        finally:
            self.leave()

    def close(self) -> None:
        """Nothing new begins, and whoever waits is told so."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        while self._line:
            self._refuse(self._line.pop(), router_shutting_down())
        if not self.in_flight:
            self._idle.set()

    async def idle(self) -> None:
        """Return once it is closed and nothing is in flight."""
        await self._idle.wait()

    def expire(self) -> None:
        """Refuse those that have waited too long."""
        now = self._clock()
        while self._expiries and (turn := next(iter(self._expiries))) and self._expiries[turn] <= now:
            self._line.remove(turn)
            message = f"no place became free within {self._max_queue_seconds:g} s: retry after the given time"
            self._refuse(turn, self._later(503, "queue_timeout", message))
        self._watch()

    def check_integrity(self) -> None:
        """Raises AssertionError where the books contradict each other."""
        self._line.check_integrity()
        assert 0 <= self.in_flight <= self._max_in_flight
        assert self.queued <= self._max_queue
        assert not self.queued or self.in_flight == self._max_in_flight, "somebody waits though there is a place"
        assert len(self._expiries) == self.queued
        assert all(turn in self._line for turn in self._expiries)
        assert not (self.closed and self.queued)

    def _line_up(self, tenant: str) -> _Turn:
        if self.closed:
            raise router_shutting_down()
        weight = self._weight_of(tenant)
        if self.queued >= self._max_queue:
            last = self._line.crowding_out(tenant, weight)
            if last is None:
                raise self._full()
            self._line.remove(last)
            self._refuse(last, self._full())
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._line.add(turn, tenant, weight)
        self._expiries[turn] = self._clock() + self._max_queue_seconds
        self._watch()
        return turn

    def _forget(self, turn: _Turn) -> None:
        self._line.remove(turn)
        del self._expiries[turn]

    def _refuse(self, turn: _Turn, error: ApiError) -> None:
        """To one that has just left the line."""
        del self._expiries[turn]
        if not turn.done():
            turn.set_exception(error)

    def _watch(self) -> None:
        """Look again when the one that came first has waited too long, if it still waits then."""
        if self._timer is None and self._expiries:
            seconds = next(iter(self._expiries.values())) - self._clock()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.expire()

    def _full(self) -> ApiError:
        message = f"{self.in_flight} requests are in flight and {self.queued} wait, the most this router takes"
        return self._later(429, "too_many_requests", f"{message}: retry after the given time")

    def _later(self, status: int, code: str, message: str) -> ApiError:
        """With the time in which all that wait, and this request, would get a place at the present pace."""
        gap_seconds = max(self._gap_seconds, self._clock() - self._gap_began)
        seconds = min(_LONGEST_RETRY_AFTER_SECONDS, (self.queued + 1) * gap_seconds)
        return ApiError(status, code, message, retry_after_seconds=seconds)

    def _measure_gap(self) -> None:
        now = self._clock()
        gap, self._gap_began = now - self._gap_began, now
        self._gap_seconds += _GAP_SMOOTHING * (gap - self._gap_seconds) if self._gap_seconds else gap
