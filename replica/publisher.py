"""Prefix cache -> Redis: what this replica holds, as fresh as some milliseconds, and a lease that says it is alive.

    engine thread --offer--> queue --> key counts (the truth) --> one delta per flush --> sets + log, one transaction
                                                              \\-> everything, as a new epoch, whenever Redis differs

One task, one write under way at a time. While Redis is away nothing piles up: the counts, bounded by the pool, go on
being kept, and the queue is emptied into them. When it is back, empty or with somebody else's state under our name, all
is published again as a new epoch. Every answer of Redis says what stands there now; any difference has the same effect.

A flush holds whole engine steps only, and all of them since the last, so what stands in Redis is prefix-closed always.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec

from replica.cache_events import CacheEvents
from shared.blocks import BlockKey, PublishedKey, checksum, published_key
from shared.fleet_state import (
    RENEW_SECONDS,
    Delta,
    FleetState,
    FleetStateMistyped,
    FleetStateUnavailable,
    LogPosition,
    Published,
    ReplicaRecord,
)

__all__ = ["Publisher"]

_FLUSH_SECONDS = 0.02
_DRAIN_SECONDS = 0.1
"""How often the queue is emptied while there is nobody to publish to."""
_FIRST_RETRY_SECONDS = 0.1
_LAST_RETRY_SECONDS = 1.0
"""Well below a lease, so that routers see us come back before they give us up."""
_SETTLED_SECONDS = 10.0
"""Without a loss for so long, the next one is news again."""
_MAX_EPOCH = 1 << 62
_OVERWRITTEN = (
    "Redis lost or changed what this replica published: publishing all again "
    "(if this goes on, another replica has the same id)"
)

_logger = logging.getLogger(__name__)


class _Tier:
    """Published keys of one tier. Counted, since two blocks may share the first 8 bytes of their keys."""

    def __init__(self) -> None:
        self._blocks: Counter[PublishedKey] = Counter()
        self._was_published: dict[PublishedKey, bool] = {}
        self.checksum = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def changed(self) -> bool:
        return bool(self._was_published)

    def apply(self, stored: Iterable[BlockKey], removed: Iterable[BlockKey]) -> None:
        for key in self._touched(stored):
            self._blocks[key] += 1
        for key in self._touched(removed):
            self._blocks[key] -= 1
            if self._blocks[key] <= 0:
                del self._blocks[key]

    def take_changes(self) -> tuple[list[PublishedKey], list[PublishedKey]]:
        """(stored, removed) since the last time: what came and went in between is in neither."""
        stored = [key for key, was in self._was_published.items() if not was and key in self._blocks]
        removed = [key for key, was in self._was_published.items() if was and key not in self._blocks]
        self._was_published.clear()
        self.checksum ^= checksum(stored) ^ checksum(removed)
        return stored, removed

    def take_all(self) -> list[PublishedKey]:
        self._was_published.clear()
        self.checksum = checksum(self._blocks)
        return list(self._blocks)

    def _touched(self, keys: Iterable[BlockKey]) -> Iterable[PublishedKey]:
        for block_key in keys:
            key = published_key(block_key)
            self._was_published.setdefault(key, key in self._blocks)
            yield key


class Publisher:
    """`offer` from any thread; everything else in the event loop that called `start`.

    `record_source` describes the replica as it is now, epoch and version aside. `tokenizer` is the packed bundle whose
    digest the record names.
    """

    def __init__(
        self,
        fleet_state: FleetState,
        record_source: Callable[[], ReplicaRecord],
        tokenizer: bytes,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._fleet_state = fleet_state
        self._record_source = record_source
        self._tokenizer = tokenizer
        self._clock = clock
        self._wall_clock = wall_clock
        self._queue: deque[CacheEvents] = deque()
        self._device = _Tier()
        self._host = _Tier()
        self._replica_id = ""
        self._position = LogPosition(0, 0)
        self._current = False
        self._state = "joining"
        self._retry_seconds = _FIRST_RETRY_SECONDS
        self._retry_at = 0.0
        self._settled_at = 0.0
        self._renew_at = 0.0
        self._flush_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._woken = False
        self._stopping = False
        self.republished = 0
        """Times that all was published as a new epoch, the first included."""

    @property
    def current(self) -> bool:
        """Redis holds what we hold, but for the events of the last moments."""
        return self._current

    @property
    def position(self) -> LogPosition:
        """Of the last delta written."""
        return self._position

    def offer(self, events: CacheEvents) -> None:
        """Take one engine step's changes. Thread-safe; never blocks."""
        if events:
            self._queue.append(events)
            self._wake_up()

    def announce_soon(self) -> None:
        """Renew the lease now: the record has changed in a way that others should see, as in draining."""
        self._renew_at = 0.0
        self._wake_up()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(), name="publisher")

    async def stop(self) -> None:
        """Leave the fleet: say goodbye, and take back all that was published. Within the time of one call to Redis."""
        if self._task is None:
            return
        self._stopping = True  # a client library may swallow the cancellation
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._task = None
        if self._state != "away":
            with suppress(FleetStateUnavailable):
                await self._fleet_state.withdraw(self._record_source())

    def _wake_up(self) -> None:
        # One wake-up per pass of the task however many steps come: `_woken` goes down before the queue is emptied.
        if self._loop is not None and not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed: nobody is left to publish
                self._loop.call_soon_threadsafe(self._wake.set)

    async def _run(self) -> None:
        while not self._stopping:
            self._drain()
            try:
                if not self._current and self._clock() >= self._retry_at:
                    await self._republish()
                now = self._clock()
                # Before a renewal too: its answer is compared with what we hold, all of which must have been written.
                if self._current and self._changed and now >= min(self._flush_at, self._renew_at):
                    await self._flush()
                if self._current and now >= self._renew_at:
                    await self._renew()
                    if self._current and self._clock() >= self._settled_at:
                        self._enter("publishing", logging.INFO, "all is published to Redis and stays there")
                        self._retry_seconds = _FIRST_RETRY_SECONDS
            except FleetStateMistyped as error:
                self._lose()
                self._enter("overwritten", logging.WARNING, f"{_OVERWRITTEN} [{error}]")
            except FleetStateUnavailable as error:
                self._lose()
                self._enter(
                    "away", logging.WARNING, f"Redis is away ({error}): serving on, and publishing when it is back"
                )
            except Exception as error:  # a fault of ours: better told than a replica that leaves in silence
                self._lose()
                _logger.exception("publishing failed (%s): publishing all again", type(error).__name__)
            if not self._stopping:
                await self._pause()

    async def _pause(self) -> None:
        now = self._clock()
        if not self._current:
            await asyncio.sleep(min(max(self._retry_at - now, 0.0), _DRAIN_SECONDS))
        elif self._changed:  # no use in waking up for more
            await asyncio.sleep(min(self._flush_at, self._renew_at) - now)
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(self._renew_at - now, 0.0)):
                    await self._wake.wait()

    def _drain(self) -> None:
        self._wake.clear()
        self._woken = False
        while self._queue:
            events = self._queue.popleft()
            self._device.apply(events.stored, events.removed)
            self._host.apply(events.host_stored, events.host_removed)

    @property
    def _changed(self) -> bool:
        return self._device.changed or self._host.changed

    async def _republish(self) -> None:
        record = self._record_source()
        self._replica_id = record.id
        last = await self._fleet_state.last_log_position(record.id)
        # Larger than any epoch seen under our name, so that a follower sees us come; nonsense is not followed upwards.
        seen = max(self._position.epoch, last.epoch if last and last.epoch < _MAX_EPOCH else 0)
        self._position = LogPosition(max(int(self._wall_clock() * 1000), seen + 1), 0)
        await self._fleet_state.put_tokenizer(record.tokenizer, self._tokenizer)
        state = self._delta(stored=self._device.take_all(), host_stored=self._host.take_all())
        self._current = True
        published = await self._fleet_state.republish(record.id, state)
        self.republished += 1
        self._compare(published)
        if self._current:
            await self._renew()
        if self._current and self._state != "overwritten":
            blocks = state.count + state.host_count
            self._enter("publishing", logging.INFO, f"published {blocks} blocks to Redis as epoch {state.epoch}")

    async def _flush(self) -> None:
        self._flush_at = self._clock() + _FLUSH_SECONDS
        stored, removed = self._device.take_changes()
        host_stored, host_removed = self._host.take_changes()
        if stored or removed or host_stored or host_removed:
            self._position = LogPosition(self._position.epoch, self._position.version + 1)
            delta = self._delta(stored, removed, host_stored, host_removed)
            self._compare(await self._fleet_state.publish(self._replica_id, delta))

    async def _renew(self) -> None:
        self._renew_at = self._clock() + RENEW_SECONDS
        epoch, version = self._position
        record = msgspec.structs.replace(self._record_source(), epoch=epoch, version=version)
        published = await self._fleet_state.announce(record)
        self._compare(published)
        if not published.tokenizer_known:
            await self._fleet_state.put_tokenizer(record.tokenizer, self._tokenizer)

    def _delta(
        self,
        stored: list[PublishedKey],
        removed: Sequence[PublishedKey] = (),
        host_stored: Sequence[PublishedKey] = (),
        host_removed: Sequence[PublishedKey] = (),
    ) -> Delta:
        return Delta(
            *self._position,
            stored=stored,
            removed=removed,
            host_stored=host_stored,
            host_removed=host_removed,
            count=len(self._device),
            checksum=self._device.checksum,
            host_count=len(self._host),
            host_checksum=self._host.checksum,
        )

    def _compare(self, published: Published) -> None:
        if published[:3] != (self._position, len(self._device), len(self._host)):
            self._lose()
            self._enter("overwritten", logging.WARNING, _OVERWRITTEN)

    def _lose(self) -> None:
        """Redis is not as it should be: publish all again, but not at once, nor all replicas at the same time."""
        self._current = False
        self._retry_at = self._clock() + self._retry_seconds * random.uniform(0.5, 1.0)
        self._retry_seconds = min(2 * self._retry_seconds, _LAST_RETRY_SECONDS)
        self._settled_at = self._clock() + _SETTLED_SECONDS

    def _enter(self, state: str, level: int, message: str) -> None:
        """Logs changes of state, not attempts."""
        if state != self._state:
            self._state = state
            _logger.log(level, message)
