"""Who is about to compute which block: whoever needs the same one next can wait for it."""

from __future__ import annotations

from itertools import islice

from replica.block_pool import IntegrityError
from replica.sequence import Sequence
from shared.blocks import BlockKey

__all__ = ["Claims"]


class Claims:
    """A key is claimed by the first admitted sequence that lacks its block, until that is registered or given up."""

    def __init__(self) -> None:
        self._claimants: dict[BlockKey, Sequence] = {}

    def __len__(self) -> int:
        return len(self._claimants)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._claimants

    def claim(self, sequence: Sequence) -> None:
        """All of its blocks that are not registered, unless somebody was first."""
        for key in islice(sequence.keys, sequence.registered_blocks, None):
            self._claimants.setdefault(key, sequence)

    def settle(self, key: BlockKey) -> None:
        """The block is there."""
        self._claimants.pop(key, None)

    def give_up(self, sequence: Sequence) -> None:
        for key in islice(sequence.keys, sequence.registered_blocks, None):
            if self._claimants.get(key) is sequence:
                del self._claimants[key]

    def last_of(self, keys: list[BlockKey]) -> BlockKey | None:
        """The last of the leading keys that somebody computes: when that one is there, so are those before it."""
        last = None
        for key in keys:
            if key not in self._claimants:
                break
            last = key
        return last

    def check_integrity(self) -> None:
        if not all(claimant.block_ids for claimant in self._claimants.values()):
            raise IntegrityError("a sequence without blocks claims to compute some")
