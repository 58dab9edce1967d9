"""Which cached blocks were asked to be kept, until when, and how many may be: a wish, never a promise.

A wish covers a prompt from its first block on, so what a kept block continues is kept at least as long. Wishes are for
a share of the pool: what goes beyond is cached like everything else, until older wishes have run out. And when nothing
else is left to evict, kept blocks go too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from replica.block_pool import IntegrityError
from replica.siblings import Parent

__all__ = ["Retention"]

_GRAIN_SECONDS = 5.0
"""Wishes end at multiples of this, so that looking for those that ended is rare however many there are."""


class Retention:
    """`clock` counts seconds; only differences matter."""

    def __init__(self, most_blocks: int, clock: Callable[[], float]) -> None:
        self.most_blocks = most_blocks
        self._clock = clock
        self._until: dict[int, float] = {}  # a block enters after what it continues
        self._next_end = math.inf

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, block: int) -> bool:
        return block in self._until

    def keep(self, chain: Iterable[int], seconds: float) -> None:
        """Keep the blocks of a prompt, first to last, that long from now. As many as there is room for."""
        end = math.ceil((self._clock() + seconds) / _GRAIN_SECONDS) * _GRAIN_SECONDS
        for block in chain:
            known = self._until.get(block)
            if known is None and len(self._until) >= self.most_blocks:
                return
            if known is None or known < end:
                self._until[block] = end
                self._next_end = min(self._next_end, end)

    def forget(self, block: int) -> None:
        self._until.pop(block, None)

    def take_ended(self) -> list[int]:
        """Blocks whose time is over, children before parents."""
        now = self._clock()
        if now < self._next_end:
            return []
        ended = [block for block, end in reversed(self._until.items()) if end <= now]
        for block in ended:
            del self._until[block]
        self._next_end = min(self._until.values(), default=math.inf)
        return ended

    def check_integrity(self, parents: Sequence[Parent | None]) -> None:
        """Raises IntegrityError where a block would be kept longer than what it continues."""
        if len(self._until) > self.most_blocks:
            raise IntegrityError(f"{len(self._until)} blocks are retained, {self.most_blocks} may be")
        seen: set[int] = set()
        for block, end in self._until.items():
            parent = parents[block]
            if parent is None or (isinstance(parent, int) and (parent not in seen or self._until[parent] < end)):
                raise IntegrityError(f"block {block} is retained longer than what it continues")
            seen.add(block)
