"""Redis -> index and fleet: one task that discovers replicas, reads what they hold, and follows their logs.

    each second      records: who is there, who has left, whose keys this router computes alike (golden keys)
    one at a time    a snapshot of a replica that is new, or whose log does not lead on from where we are; of no other
    otherwise        all logs in one blocking read, at most 50 a second; each delta is applied if it is the next, and
                     proved by its checksum

No request waits for any of this. While Redis is away the last view stays, and its age is known: see `view`.

A replica is gone when its lease has run out or it said goodbye. One that is missing altogether has been lost by *Redis*
(flushed, restarted empty): it is kept for as long as replicas need to publish again, and so are all after an outage.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NamedTuple

from router.block_index import BlockIndex, HeldKeys, HeldTier
from router.encoder_loader import EncoderLoader
from router.fleet import Fleet, FleetReplica
from shared.blocks import BlockKey, golden_key, namespace_root
from shared.fleet_state import (
    LEASE_SECONDS,
    LOG_READ_ENTRIES,
    Delta,
    FleetState,
    FleetStateMistyped,
    FleetStateUnavailable,
    LogEntry,
    LogPosition,
    ReplicaRecord,
)

__all__ = ["FleetView", "Follower"]

_DISCOVER_SECONDS = 1.0
_BLOCK_MS = 200
_GATHER_SECONDS = 0.02
"""Between two reads that brought news: each costs as much as several requests, and promises bridge the time."""
_EXACT_SECONDS = 2.0
"""A view older than this is not called exact any more."""
_STALE_SECONDS = 300.0
"""And one older than this says nothing: caches have turned over."""
_VANISHED_SECONDS = 60.0
_FIRST_RETRY_SECONDS = 0.1
_LAST_RETRY_SECONDS = 1.0
_APPLY_KEYS = 2048
"""Of one delta without a pause, about a millisecond: a reset removes a whole pool at once."""

_SWEEP_STEPS = 16
"""Of clearing the index after replicas that left, between two reads."""
_GOLDEN_KEYS = 64

_logger = logging.getLogger(__name__)

RereadReason = Literal["joined", "epoch", "gap", "checksum", "malformed", "fault"]


class FleetView(NamedTuple):
    """The rung of the ladder that our view of the caches allows, and how old it is (None: there never was one)."""

    step: Literal["exact", "stale", "hash"]
    age_seconds: float | None


class Follower:
    """`start` it in the router's loop; `fleet` and `index` are written here and read everywhere."""

    def __init__(
        self,
        fleet_state: FleetState,
        fleet: Fleet,
        index: BlockIndex,
        secret: str = "",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet_state = fleet_state
        self._fleet = fleet
        self._index = index
        self._secret = secret
        self._clock = clock
        self._encoders = EncoderLoader(fleet_state, fleet, self._discover_soon, clock)
        self._golden_prompt_keys: dict[tuple[str, str, int], str] = {}
        self._positions: dict[str, LogPosition] = {}
        self._to_read: dict[str, RereadReason] = {}
        self._unreadable: dict[str, RereadReason] = {}
        self._mistyped: set[str] = set()
        self._discover_at = 0.0
        self._current_at: float | None = None
        self._keep_all_until = 0.0
        self._lost_by_redis: set[str] = set()
        self._vacant_since: dict[str, float] = {}
        self._had_news = False
        self._away = False
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self.reread: Counter[RereadReason] = Counter()
        """Snapshots read, by reason."""
        self.applied_deltas = 0

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="follower")

    async def stop(self) -> None:
        # Cancelling alone is not enough: until Python 3.12 asyncio.wait_for, which the Redis client uses to send, may
        # swallow it.
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._encoders.close()

    @property
    def view(self) -> FleetView:
        if self._current_at is None:
            return FleetView("hash", None)
        age = max(0.0, self._clock() - self._current_at)
        if age > _STALE_SECONDS:
            return FleetView("hash", age)
        return FleetView("stale" if age > _EXACT_SECONDS or self._lost_by_redis else "exact", age)

    @property
    def connected(self) -> bool:
        """Redis answered when it was last asked."""
        return self._current_at is not None and not self._away

    def position(self, replica_id: str) -> LogPosition | None:
        """Up to where this replica's log has been applied; None while it is not followed."""
        return self._positions.get(replica_id)

    async def _run(self) -> None:
        retry_seconds = _FIRST_RETRY_SECONDS
        while not self._stopping:
            try:
                await self._step()
            except FleetStateUnavailable as error:
                if not self._away:
                    self._away = True
                    _logger.warning("Redis is away (%s): routing by the last view of the caches", error)
                self._discover_soon()
                await asyncio.sleep(retry_seconds)
                retry_seconds = min(2 * retry_seconds, _LAST_RETRY_SECONDS)
            except Exception:  # a fault of ours: better told each second than a view that grows old in silence
                _logger.exception("following the fleet failed: reading all again")
                for replica_id in list(self._positions):
                    self._doubt(replica_id, "fault")
                await asyncio.sleep(_LAST_RETRY_SECONDS)
            else:
                retry_seconds = _FIRST_RETRY_SECONDS
            for _ in range(_SWEEP_STEPS):
                if not self._index.sweep():
                    break
                await asyncio.sleep(0)

    async def _step(self) -> None:
        if self._clock() >= self._discover_at:
            await self._discover()
            self._discover_at = self._clock() + _DISCOVER_SECONDS
        if self._to_read:
            await self._read_again(next(iter(self._to_read)))
        if await self._follow(wait=not self._to_read):
            self._current_at = self._clock()

    # Who is there

    def _discover_soon(self) -> None:
        self._discover_at = 0.0

    async def _discover(self) -> None:
        known = {replica.id for replica in self._fleet if replica.source == "redis"}
        try:
            listed = await self._fleet_state.replica_ids()
        except FleetStateMistyped:  # nobody new can be found; those known are still read
            listed = known
        records = await self._fleet_state.records(listed | known)
        now = self._clock()
        if self._away:
            self._away = False
            self._keep_all_until = now + LEASE_SECONDS
            _logger.info("Redis is back: reading on")
        self._lost_by_redis.clear()
        for record in records.values():
            if record.state == "gone":
                self._leave(record.id, "it said goodbye")
            else:
                self._welcome(record, now)
        for replica_id in known - records.keys():
            self._miss(replica_id, replica_id in listed, now)
        await self._unlist_the_vanished(listed - records.keys(), now)

    def _welcome(self, record: ReplicaRecord, now: float) -> None:
        known = self._fleet.get(record.id)
        replica = self._fleet.update(record, now)
        if known is not replica:
            _logger.info("replica %r joined: %s at %s", record.id, record.model, record.url)
        if not self._check_compatible(replica, record):
            self._forget(record.id)
            return
        position = self._positions.get(record.id)
        if position is None:
            self._to_read.setdefault(record.id, self._unreadable.pop(record.id, "joined"))
        elif record.epoch != position.epoch:
            self._doubt(record.id, "epoch")

    def _check_compatible(self, replica: FleetReplica, record: ReplicaRecord) -> bool:
        """Whether this router computes the keys that the replica does; if not, its cache is unknown here, not wrong."""
        reason = None
        root = namespace_root(record.fingerprint, secret=self._secret)
        if golden_key(root, record.block_size) != record.golden_key:
            reason = "its golden key is not ours: other cluster secret, or other version of the block keys"
        elif record.tokenizer:
            self._encoders.want(record.tokenizer)
            if self._golden_prompt_key(record, root) not in (None, record.golden_prompt_key):
                reason = "its golden prompt key is not ours: template or tokenizer give other tokens there than here"
        if reason is not None and replica.incompatibility != reason:
            _logger.error("replica %r is INCOMPATIBLE, its cache will not be used: %s", record.id, reason)
        self._fleet.set_incompatibility(record.id, reason)
        return reason is None

    def _golden_prompt_key(self, record: ReplicaRecord, root: BlockKey) -> str | None:
        """Ours for that replica's tokenizer; None while we do not have it. Remembered: it costs a tokenization."""
        encoder = self._fleet.encoder(record.tokenizer)
        if encoder is None:
            return None
        identity = (record.tokenizer, record.fingerprint, record.block_size)
        if identity not in self._golden_prompt_keys:
            if len(self._golden_prompt_keys) >= _GOLDEN_KEYS:
                self._golden_prompt_keys.clear()
            self._golden_prompt_keys[identity] = encoder.golden_prompt_key(root, record.block_size)
        return self._golden_prompt_keys[identity]

    def _miss(self, replica_id: str, listed: bool, now: float) -> None:
        replica = self._fleet.get(replica_id)
        if replica is None:
            return
        lost_by_redis = not listed and now - replica.last_seen_seconds < LEASE_SECONDS
        if lost_by_redis or now < self._keep_all_until:
            self._lost_by_redis.add(replica_id)
        else:
            self._leave(replica_id, "its lease has run out")

    async def _unlist_the_vanished(self, vacant: set[str], now: float) -> None:
        # Crashed replicas with made-up names would lengthen the list for ever.
        self._vacant_since = {replica_id: self._vacant_since.get(replica_id, now) for replica_id in vacant}
        vanished = [replica_id for replica_id, since in self._vacant_since.items() if now - since > _VANISHED_SECONDS]
        if vanished:
            await self._fleet_state.unlist(vanished)

    def _leave(self, replica_id: str, reason: str) -> None:
        if self._fleet.get(replica_id) is not None:
            _logger.info("replica %r left: %s", replica_id, reason)
        self._forget(replica_id)
        self._fleet.leave(replica_id)

    def _forget(self, replica_id: str) -> None:
        for known in (self._positions, self._to_read, self._unreadable):
            known.pop(replica_id, None)
        self._mistyped.discard(replica_id)
        self._index.remove(replica_id)

    # What they hold

    def _doubt(self, replica_id: str, reason: RereadReason) -> None:
        """The log does not lead on from where we are. What we have stays until it has been read again."""
        self._positions.pop(replica_id, None)
        self._to_read[replica_id] = reason

    async def _read_again(self, replica_id: str) -> None:
        try:
            snapshot = await self._fleet_state.snapshot(replica_id)
        except FleetStateMistyped as error:
            snapshot = None
            self._index.remove(replica_id)
            if replica_id not in self._mistyped:
                self._mistyped.add(replica_id)
                _logger.warning("the cache of replica %r is unknown until it publishes again: %s", replica_id, error)
        else:
            self._mistyped.discard(replica_id)
        reason = self._to_read.pop(replica_id)
        if snapshot is None:  # not complete there: the next discovery comes back to it
            self._unreadable[replica_id] = reason
            return
        self.reread[reason] += 1
        if reason != "joined":
            _logger.info("replica %r is read again: %s", replica_id, reason)
        for _ in self._index.replacing(replica_id, snapshot.device_keys, snapshot.host_keys):
            await asyncio.sleep(0)
        if self._index.held(replica_id) == _held_after(snapshot.last):
            self._positions[replica_id] = snapshot.last.position
        else:  # somebody changed the sets behind the publisher's back; it will notice and publish anew
            self._index.remove(replica_id)
            self._unreadable[replica_id] = "checksum"

    async def _follow(self, wait: bool) -> bool:
        """Apply what is new in the logs. True when that was all of it."""
        if not self._positions:
            if wait:
                await asyncio.sleep(min(_BLOCK_MS / 1000, max(0.0, self._discover_at - self._clock())))
            return not self._to_read
        if wait and self._had_news:
            await asyncio.sleep(_GATHER_SECONDS)
        entries = await self._fleet_state.read_log(self._positions, _BLOCK_MS if wait else 1)
        self._had_news = bool(entries)
        for entry in entries:
            await self._apply(entry)
        per_replica = Counter(entry.replica_id for entry in entries)
        return not self._to_read and max(per_replica.values(), default=0) < LOG_READ_ENTRIES

    async def _apply(self, entry: LogEntry) -> None:
        position = self._positions.get(entry.replica_id)
        if position is None:
            return  # in doubt since an earlier entry
        if entry.delta is None:
            self._doubt(entry.replica_id, "malformed")
        elif entry.position.epoch != position.epoch:
            self._doubt(entry.replica_id, "epoch")
        elif entry.position.version != position.version + 1:
            self._doubt(entry.replica_id, "gap")
        else:
            await self._change(entry.replica_id, entry.delta)
            if self._index.held(entry.replica_id) == _held_after(entry.delta):
                self._positions[entry.replica_id] = entry.position
                self.applied_deltas += 1
            else:
                self._doubt(entry.replica_id, "checksum")

    async def _change(self, replica_id: str, delta: Delta) -> None:
        lists = (delta.stored, delta.removed, delta.host_stored, delta.host_removed)
        for start in range(0, max(1, *map(len, lists)), _APPLY_KEYS):
            if start:
                await asyncio.sleep(0)
            self._index.apply(replica_id, *(keys[start : start + _APPLY_KEYS] for keys in lists))


def _held_after(delta: Delta) -> HeldKeys:
    return HeldKeys(HeldTier(delta.count, delta.checksum), HeldTier(delta.host_count, delta.host_checksum))
