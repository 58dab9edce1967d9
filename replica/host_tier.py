"""KV blocks in host memory: what the device gave up and a prompt may still hit.

    device   [ system prompt | turn 1 ]                         a chain begins on the device ...
    host                               [ turn 2 | turn 3 ]      ... and goes on here: together they are prefix-closed

A block is in one tier at a time. It comes here when the device evicts it, and the device evicts leaves: so children are
here before their parents come, and giving up the oldest arrival never leaves a child without its parent.

Keys, not ids, tell here what a block continues, since its parent may change its place. That is as strict: of one key,
only one content is held in both tiers together, and its tokens are compared on every hit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from replica.block_pool import IntegrityError
from replica.cache_events import TierChanges
from shared.blocks import BlockKey

__all__ = ["Arrival", "HostBlock", "HostTier"]


class HostBlock(NamedTuple):
    """`place` is its id in the runner's host pool; `parent_key` the key of the block before it, or its root."""

    place: int
    parent_key: BlockKey
    content: bytes


class Arrival(NamedTuple):
    place: int
    pushed_out: int
    """Blocks given up for it: 0 or 1."""


class HostTier:
    """Owns the block ids of the host pool, of any size from 0 on. Changes go to `changes`."""

    def __init__(self, num_blocks: int, changes: TierChanges) -> None:
        self.num_blocks = num_blocks
        self._changes = changes
        self._held: OrderedDict[BlockKey, HostBlock] = OrderedDict()  # oldest arrival first
        self._free = list(range(num_blocks - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._held

    def items(self) -> Iterator[tuple[BlockKey, HostBlock]]:
        """Parents before children."""
        return iter(reversed(self._held.items()))

    def has(self, key: BlockKey, parent_key: BlockKey, content: bytes) -> bool:
        """A key is only a hint: tokens and parent decide."""
        block = self._held.get(key)
        return block is not None and block.parent_key == parent_key and block.content == content

    def put(self, key: BlockKey, parent_key: BlockKey, content: bytes) -> Arrival | None:
        """Take in a block that the device gives up; None while every place is on its way to the device."""
        pushed_out = 0
        if not self._free:
            if not self._held:
                return None
            self.release(self.take(next(iter(self._held))))
            pushed_out = 1
        place = self._free.pop()
        self._held[key] = HostBlock(place, parent_key, content)
        self._changes.store(key)
        return Arrival(place, pushed_out)

    def take(self, key: BlockKey) -> HostBlock:
        """The block is not held any more, but its place is kept until it is `release`d."""
        block = self._held.pop(key)
        self._changes.remove(key)
        return block

    def release(self, block: HostBlock) -> None:
        self._free.append(block.place)

    def clear(self) -> None:
        """Forget everything, children before parents."""
        for key in list(self._held):
            self.release(self.take(key))

    def check_integrity(self, on_device: Callable[[BlockKey], object | None]) -> None:
        """Raises IntegrityError unless every place is free or holds one block, and parents came after children."""
        places = [block.place for block in self._held.values()]
        if sorted([*places, *self._free]) != list(range(self.num_blocks)):
            raise IntegrityError("a place in host memory is lost, or given twice")
        arrival = {key: number for number, key in enumerate(self._held)}
        for key, block in self._held.items():
            if on_device(key) is not None:
                raise IntegrityError("a block is in both tiers")
            if arrival.get(block.parent_key, self.num_blocks) <= arrival[key]:
                raise IntegrityError("a block in host memory would outlive its parent")
