"""The work of several routers in each one's ledger. Pure: what carries batches between them is `work_exchange`.

    our attempts --> Journal.take() --> batch  ~~~>  OthersWork.apply(batch) --> their ledger

Others' dispatches stand in the ledger like our own, promises and all: so a queue that somebody else fills is seen while
it fills, and nobody flees from one that is old news. They leave it by their end, or with their router: when a batch of
it was missed (an end may have been in it), when nothing was heard of it for a lease, when it says everything afresh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice

from router.ledger import Dispatch, Ledger
from shared.blocks import pack_keys, unpack_keys
from shared.fleet_state import LEASE_SECONDS
from shared.work_events import Dispatched, Ended, FirstToken, WorkBatch, WorkEvent

__all__ = ["Journal", "OthersWork"]

_MOST_PROMISED_KEYS = 512
"""Told of one dispatch: 4 KiB."""
_MOST_EVENTS = 4096
"""Of one batch. More have not been fetched for a while: then all that is under way is told at once instead."""
_MOST_ROUTERS = 1024
_MOST_DISPATCHES = 16_384
"""Of one other router."""


class Journal:
    """What this router has to tell. Each request costs a few appends; batches are made in the background."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self._numbers: dict[Dispatch, int] = {}
        self._next_number = 0
        self._happened: list[tuple[Callable[[int, Dispatch], WorkEvent], int, Dispatch]] = []
        self._next_batch = 0
        self._afresh = True

    def dispatched(self, dispatch: Dispatch) -> None:
        self._numbers[dispatch] = self._next_number
        self._note(_dispatched, self._next_number, dispatch)
        self._next_number += 1

    def first_token(self, dispatch: Dispatch) -> None:
        if (number := self._numbers.get(dispatch)) is not None:
            self._note(_first_token, number, dispatch)

    def ended(self, dispatch: Dispatch) -> None:
        if (number := self._numbers.pop(dispatch, None)) is not None:
            self._note(_ended, number, dispatch)

    def _note(self, event: Callable[[int, Dispatch], WorkEvent], number: int, dispatch: Dispatch) -> None:
        if not self._afresh:
            self._happened.append((event, number, dispatch))
            if len(self._happened) >= _MOST_EVENTS:
                self.begin_afresh()

    def __len__(self) -> int:
        """Events to tell."""
        return len(self._happened)

    def begin_afresh(self) -> None:
        """The next batch says all that is under way: somebody new listens, or a batch was lost."""
        self._afresh = True
        self._happened.clear()

    def take(self) -> WorkBatch:
        """What has happened since the last batch. Numbers go up by one from batch to batch."""
        fresh, self._afresh = self._afresh, False
        happened, self._happened = self._happened, []
        events = list(self._under_way()) if fresh else [event(number, each) for event, number, each in happened]
        return self._batch(fresh, events)

    def sign_of_life(self) -> WorkBatch:
        """A batch for nobody in particular: whoever hears it makes itself heard, and is told the rest."""
        self.begin_afresh()
        return self._batch(True, [])

    def _batch(self, fresh: bool, events: list[WorkEvent]) -> WorkBatch:
        self._next_batch += 1
        return WorkBatch(self.router_id, self._next_batch, fresh, events)

    def _under_way(self) -> Iterator[WorkEvent]:
        for dispatch, number in islice(self._numbers.items(), _MOST_EVENTS):
            yield _dispatched(number, dispatch)
            if dispatch.first_token_seen:
                yield FirstToken(number)


class OthersWork:
    """`knows` tells which replicas there are: work at others is nothing to us."""

    def __init__(self, ledger: Ledger, knows: Callable[[str], bool]) -> None:
        self._ledger = ledger
        self._knows = knows
        self._routers: dict[str, _Other] = {}

    def __len__(self) -> int:
        """Routers heard of within the lease."""
        return len(self._routers)

    def apply(self, batch: WorkBatch, now: float) -> bool:
        """True if its router had not been heard of before."""
        other = self._routers.get(batch.router_id)
        joined = other is None
        if other is None:
            if len(self._routers) >= _MOST_ROUTERS:
                return False
            other = self._routers[batch.router_id] = _Other()
        if batch.fresh or batch.number != other.last_batch + 1:
            self._release_all(other, now)
        other.last_batch, other.heard_at = batch.number, now
        for event in batch.events:
            if isinstance(event, Dispatched):
                self._count_in(other, event, now)
            elif (dispatch := other.dispatches.get(event.number)) is None:
                continue
            elif isinstance(event, FirstToken):
                self._ledger.first_token(dispatch, now)
            else:
                self._ledger.release(other.dispatches.pop(event.number), now)
        return joined

    def expire(self, now: float) -> None:
        """Forget routers whose lease has ended, and what they had under way."""
        for router_id, other in list(self._routers.items()):
            if now - other.heard_at > LEASE_SECONDS:
                self._release_all(other, now)
                del self._routers[router_id]

    def _count_in(self, other: _Other, told: Dispatched, now: float) -> None:
        if told.number in other.dispatches or not math.isfinite(told.service_seconds):
            return
        if len(other.dispatches) >= _MOST_DISPATCHES or len(told.promised) % 8 or not self._knows(told.replica_id):
            return
        other.dispatches[told.number] = self._ledger.dispatch(
            told.replica_id,
            now,
            service_seconds=told.service_seconds,
            uncached_tokens=told.uncached_tokens,
            promised=unpack_keys(told.promised),
            streamed=told.streamed,
        )

    def _release_all(self, other: _Other, now: float) -> None:
        for dispatch in other.dispatches.values():
            self._ledger.release(dispatch, now)
        other.dispatches.clear()


class _Other:
    """What is known of one other router."""

    __slots__ = ("dispatches", "heard_at", "last_batch")

    def __init__(self) -> None:
        self.dispatches: dict[int, Dispatch] = {}
        self.heard_at = 0.0
        self.last_batch = 0


def _dispatched(number: int, dispatch: Dispatch) -> WorkEvent:
    return Dispatched(
        number,
        dispatch.replica_id,
        dispatch.service_seconds,
        dispatch.uncached,
        dispatch.streamed,
        pack_keys(dispatch.promised[:_MOST_PROMISED_KEYS]),
    )


def _first_token(number: int, dispatch: Dispatch) -> WorkEvent:
    return FirstToken(number)


def _ended(number: int, dispatch: Dispatch) -> WorkEvent:
    return Ended(number)
