"""Routers' batches of work, to and from Redis: one round trip every 25 ms beside others, two a second alone.

While Redis is away others' work runs out with its lease, ours is told afresh when it is back, and nothing piles up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from router.shared_work import Journal, OthersWork
from shared.fleet_state import RENEW_SECONDS, FleetState, FleetStateUnavailable

__all__ = ["WorkExchange"]

_BESIDE_OTHERS_SECONDS = 0.025
_ALONE_SECONDS = 0.5

_logger = logging.getLogger(__name__)


class WorkExchange:
    """`start` it in the router's loop."""

    def __init__(
        self,
        fleet_state: FleetState,
        journal: Journal,
        others: OthersWork,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet_state = fleet_state
        self._journal = journal
        self._others = others
        self._clock = clock
        self._position: str | None = None
        self._told_at = float("-inf")
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="work exchange")

    async def stop(self) -> None:
        # As in `Follower.stop`: a cancellation may be swallowed.
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while not self._stopping:
            pause_seconds = _ALONE_SECONDS
            try:
                await self._step()
                if self._others:
                    pause_seconds = _BESIDE_OTHERS_SECONDS
            except FleetStateUnavailable as error:
                _logger.debug("other routers' work is unknown while Redis is away: %s", error)
                self._begin_afresh()
            except Exception:  # a fault of ours: better told than work that others count for ever
                _logger.exception("telling other routers of the work failed: telling all of it again")
                self._begin_afresh()
                pause_seconds = _ALONE_SECONDS
            self._others.expire(self._clock())
            await asyncio.sleep(pause_seconds)

    def _begin_afresh(self) -> None:
        self._position = None
        self._journal.begin_afresh()

    async def _step(self) -> None:
        due = self._clock() - self._told_at >= RENEW_SECONDS
        batch = None
        if self._others and (due or len(self._journal)):
            batch = self._journal.take()
        elif due:
            batch = self._journal.sign_of_life()
        read = await self._fleet_state.exchange_work(self._journal.router_id, batch, self._position)
        self._position, now = read.position, self._clock()
        if batch is not None:
            self._told_at = now
        newcomers = [self._others.apply(batch, now) for batch in read.batches]
        if any(newcomers):
            self._journal.begin_afresh()
            self._told_at = float("-inf")
