"""Which KV blocks are used, cached or free, and in what order they are given away. Knows nothing of their content.

    used     references > 0, in no queue
    cached   idle but worth keeping: in the queue, behind every free block
    free     idle and worthless: at the front of the queue

    front [ free free | cached: least recently released ......... most recently released ] back
            ^ take() comes from here                                 release(keep=True) goes here ^

Whoever releases a sequence's blocks tail first makes the queue leaf-only: a block's children stand before it, so
they are always given away first.
"""

from __future__ import annotations

__all__ = ["BlockPool", "IntegrityError"]


class IntegrityError(Exception):
    """The bookkeeping of the KV blocks contradicts itself: a bug, never a user's mistake."""


class BlockPool:
    """Blocks 0 to num_blocks - 1. Every operation is O(1); arrays instead of one object a block."""

    __slots__ = ("_before", "_behind", "_kept", "cached_blocks", "idle_blocks", "num_blocks", "references")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.idle_blocks = num_blocks
        """Free and cached ones together: how many `take` can give."""
        self.cached_blocks = 0
        # A ring of doubly linked block ids; the extra place `num_blocks` is its seam: front after it, back before it.
        self._behind: list[int] = [*range(1, num_blocks + 1), 0]
        self._before: list[int] = [num_blocks, *range(num_blocks)]
        self._kept = bytearray(num_blocks)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - self.idle_blocks

    @property
    def free_blocks(self) -> int:
        return self.idle_blocks - self.cached_blocks

    def take(self) -> int:
        """The front of the queue, with one reference. The caller has seen that `idle_blocks` is not 0."""
        block = self._behind[self.num_blocks]
        assert block != self.num_blocks, "the pool is exhausted"
        self.share(block)
        return block

    def share(self, block: int) -> None:
        """One reference more. A cached block thereby leaves the queue."""
        if self.references[block] == 0:
            before, behind = self._before[block], self._behind[block]
            self._behind[before] = behind
            self._before[behind] = before
            self.idle_blocks -= 1
            self.cached_blocks -= self._kept[block]
            self._kept[block] = 0
        self.references[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """One reference less. The last one sends the block to the queue: to its back if `keep`, else to its front."""
        references = self.references
        assert references[block] > 0, f"block {block} is released more often than taken"
        references[block] -= 1
        if references[block]:
            return
        seam = self.num_blocks
        if keep:
            before, behind = self._before[seam], seam
            self._kept[block] = 1
            self.cached_blocks += 1
        else:
            before, behind = seam, self._behind[seam]
        self._before[block], self._behind[block] = before, behind
        self._behind[before] = self._before[behind] = block
        self.idle_blocks += 1

    def queue(self) -> list[int]:
        """Idle blocks, front to back. O(pool): for tests and integrity checks."""
        blocks: list[int] = []
        block = self._behind[self.num_blocks]
        while block != self.num_blocks and len(blocks) <= self.num_blocks:
            blocks.append(block)
            block = self._behind[block]
        return blocks

    def is_cached(self, block: int) -> bool:
        return bool(self._kept[block])

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the queue holds exactly the idle blocks, free ones before cached ones."""
        queue = self.queue()
        idle = [block for block, count in enumerate(self.references) if count == 0]
        if sorted(queue) != idle or len(queue) != self.idle_blocks:
            raise IntegrityError(f"{len(queue)} blocks queue, {len(idle)} are idle, {self.idle_blocks} are counted")
        if any(self._before[self._behind[block]] != block for block in (*queue, self.num_blocks)):
            raise IntegrityError("the queue's links disagree")
        kept = [self._kept[block] for block in queue]
        if kept != sorted(kept) or sum(kept) != self.cached_blocks or sum(self._kept) != self.cached_blocks:
            raise IntegrityError(f"{sum(kept)} cached blocks queue, {self.cached_blocks} are counted, or out of order")
        if any(count < 0 for count in self.references):
            raise IntegrityError("a block has fewer than no references")
