"""A router's follower with its fleet and index, as tests look at them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from router.block_index import BlockIndex
from router.fleet import Fleet
from router.follower import Follower
from shared.blocks import PublishedKey, published_key
from shared.fleet_state import FleetState
from tests.fleet_members import Member


@dataclass
class Router:
    fleet: Fleet
    index: BlockIndex
    follower: Follower

    def states(self) -> dict[str, str]:
        return {replica.id: replica.state for replica in self.fleet}

    def knows(self, *members: Member) -> bool:
        """The index holds for each of them exactly what it holds itself, and is at the end of its log."""
        self.follower._discover_soon()  # only to save the tests their seconds
        return all(
            self.follower.position(member.id) == member.publisher.position
            and self.keys_of(member.id) == {published_key(key) for key in member.held}
            for member in members
        )

    def keys_of(self, replica_id: str) -> set[PublishedKey]:
        slot = self.index._slots.get(replica_id)
        return set() if slot is None else {key for key, holders in self.index._device.items() if holders >> slot & 1}


@asynccontextmanager
async def following(url: str, secret: str = "", clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Router]:
    state = FleetState(url, secret=secret, timeout_seconds=1.0)
    fleet, index = Fleet(), BlockIndex()
    follower = Follower(state, fleet, index, secret, clock=clock)
    follower.start()
    try:
        yield Router(fleet, index, follower)
    finally:
        await follower.stop()
        await state.close()
    index.check_integrity()
