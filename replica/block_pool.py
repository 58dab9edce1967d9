"""Which KV blocks are used, cached or free, and in what order they are given away. Knows nothing of their content.

    used       references > 0, in no queue
    retained   idle, and asked to be kept: at the end of the queue
    cached     idle but worth keeping: in the queue, behind every free block
    free       idle and worthless: at the front of the queue

    front [ free free | cached: least recently released ... most recently | retained: least recently ... most ] back
            ^ take() comes from here               release(keep=True) goes here ^     with retain=True, here ^

Whoever releases a sequence's blocks tail first makes the queue leaf-only: a block's children stand before it, so
they are always given away first. That holds with retained blocks too, if whatever a retained block continues is
retained as well.
"""

from __future__ import annotations

__all__ = ["BlockPool", "IntegrityError"]


class IntegrityError(Exception):
    """The bookkeeping of the KV blocks contradicts itself: a bug, never a user's mistake."""


class BlockPool:
    """Blocks 0 to num_blocks - 1. Every operation is O(1); arrays instead of one object a block."""

    __slots__ = ("_before", "_behind", "_fence", "_kept", "cached_blocks", "idle_blocks", "num_blocks", "references")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.idle_blocks = num_blocks
        """Free and cached ones together: how many `take` can give."""
        self.cached_blocks = 0
        # A ring of doubly linked block ids, and of two places more: the fence, behind which the retained ones stand,
        # and (the last place) the seam: front after it, back before it.
        self._fence = num_blocks
        self._behind: list[int] = [*range(1, num_blocks + 2), 0]
        self._before: list[int] = [num_blocks + 1, *range(num_blocks + 1)]
        self._kept = bytearray(num_blocks)  # 1 cached, 2 retained

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - self.idle_blocks

    @property
    def free_blocks(self) -> int:
        return self.idle_blocks - self.cached_blocks

    def take(self) -> int:
        """The front of the queue, with one reference. The caller has seen that `idle_blocks` is not 0."""
        assert self.idle_blocks, "the pool is exhausted"
        block = self._behind[-1]
        if block == self._fence:
            block = self._behind[block]
        self.share(block)
        return block

    def share(self, block: int) -> None:
        """One reference more. A cached block thereby leaves the queue."""
        if self.references[block] == 0:
            before, behind = self._before[block], self._behind[block]
            self._behind[before] = behind
            self._before[behind] = before
            self.idle_blocks -= 1
            self.cached_blocks -= self.is_cached(block)
            self._kept[block] = 0
        self.references[block] += 1

    def release(self, block: int, *, keep: bool, retain: bool = False) -> None:
        """One reference less. The last one sends the block to the queue: to the end of its kind, or (not kept) to the
        front."""
        references = self.references
        assert references[block] > 0, f"block {block} is released more often than taken"
        references[block] -= 1
        if references[block]:
            return
        if keep:
            behind = self.num_blocks + 1 if retain else self._fence
            before = self._before[behind]
            self._kept[block] = 2 if retain else 1
            self.cached_blocks += 1
        else:
            before = self.num_blocks + 1
            behind = self._behind[before]
        self._before[block], self._behind[block] = before, behind
        self._behind[before] = self._before[behind] = block
        self.idle_blocks += 1

    def requeue(self, block: int, *, keep: bool, retain: bool = False) -> None:
        """As if an idle block had been used until now; blocks in use stay where they are."""
        if self.references[block] == 0:
            self.share(block)
            self.release(block, keep=keep, retain=retain)

    def queue(self) -> list[int]:
        """Idle blocks, front to back. O(pool): for tests and integrity checks."""
        return [place for place in self._ring() if place != self._fence]

    def is_cached(self, block: int) -> bool:
        return bool(self._kept[block])

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the queue holds exactly the idle blocks: free, cached, fence, retained."""
        ring = self._ring()
        queue = self.queue()
        idle = [block for block, count in enumerate(self.references) if count == 0]
        if sorted(queue) != idle or len(queue) != self.idle_blocks:
            raise IntegrityError(f"{len(queue)} blocks queue, {len(idle)} are idle, {self.idle_blocks} are counted")
        if any(self._before[self._behind[place]] != place for place in (*ring, self.num_blocks + 1)):
            raise IntegrityError("the queue's links disagree")
        # The fence stands between what is worth 1 and what is worth 2.
        kept = [1.5 if place == self._fence else self._kept[place] for place in ring]
        cached = sum(map(bool, kept)) - 1
        if kept != sorted(kept) or not cached == self.cached_blocks == sum(map(bool, self._kept)):
            raise IntegrityError(f"{cached} cached blocks queue, {self.cached_blocks} are counted, or out of order")
        if any(count < 0 for count in self.references):
            raise IntegrityError("a block has fewer than no references")

    def _ring(self) -> list[int]:
        """All places of the queue, the fence among them."""
        places: list[int] = []
        place = self._behind[-1]
        while place != self.num_blocks + 1 and len(places) <= self.num_blocks + 1:
            places.append(place)
            place = self._behind[place]
        return places
