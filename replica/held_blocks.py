"""What the cached blocks of the device hold: tokens, key, and the block that each continues.

held   full; its key finds it, and everything it continues is held: so its key stands for a whole prefix
tail   not full, and so without a key; found only among the children of what it continues. Never in use: what it
       holds is copied
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from replica.block_pool import BlockPool, IntegrityError
from replica.siblings import TOKEN_BYTES, Parent, Sibling, Siblings
from shared.blocks import BlockKey

__all__ = ["HeldBlocks"]


class HeldBlocks:
    """By block id: `keys`, `parents` and `contents` (packed tokens); None where a block is not cached."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.keys: Final[list[BlockKey | None]] = [None] * num_blocks
        self.parents: Final[list[Parent | None]] = [None] * num_blocks
        self.contents: Final[list[bytes | None]] = [None] * num_blocks
        self.siblings = Siblings(self.contents)
        self._num_blocks = num_blocks
        self._block_bytes = block_size * TOKEN_BYTES
        self._table: dict[BlockKey, int] = {}  # a parent always enters before its children and leaves after them
        self.find: Final[Callable[[BlockKey], int | None]] = self._table.get

    def __len__(self) -> int:
        """Tails do not count."""
        return len(self._table)

    def __iter__(self) -> Iterator[BlockKey]:
        """Keys, parents before children."""
        return iter(self._table)

    def __reversed__(self) -> Iterator[BlockKey]:
        return reversed(self._table)

    def is_tail(self, block: int) -> bool:
        return self.keys[block] is None and self.contents[block] is not None

    def has(self, block: int, parent: Parent, content: bytes) -> bool:
        """A key is only a hint: tokens and parent decide."""
        return self.parents[block] == parent and self.contents[block] == content

    def parent_key(self, parent: Parent) -> BlockKey:
        """What stands for it outside the device: the key of a block, or the root itself."""
        if not isinstance(parent, int):
            return parent
        key = self.keys[parent]
        assert key is not None, f"block {parent} has children and no key"
        return key

    def add(self, block: int, key: BlockKey | None, parent: Parent, content: bytes) -> None:
        """Without a key it is a tail."""
        if key is not None:
            self._table[key] = block
        self.keys[block], self.parents[block], self.contents[block] = key, parent, content
        self.siblings.add(parent, block)

    def drop(self, block: int) -> None:
        key, parent = self.keys[block], self.parents[block]
        assert parent is not None, f"block {block} is not cached"
        self.siblings.discard(parent, block)
        if key is not None:
            del self._table[key]
        self.keys[block] = self.parents[block] = self.contents[block] = None

    def tail_within(self, parent: Parent, content: bytes) -> int | None:
        """The tail that `content` goes on from, and so makes worthless. There is one at most."""
        # Whatever stood between the two would begin with the tail as well, and have replaced it.
        before = self.siblings.before(parent, content)
        begins = None if before is None else self.contents[before]
        return before if begins is not None and content.startswith(begins) else None

    def closest(self, parent: Parent, content: bytes) -> Sibling | None:
        return self.siblings.closest(parent, content)

    def check_integrity(self, pool: BlockPool) -> None:
        """Raises IntegrityError unless what is held is prefix-closed, and will be whatever is evicted next. O(pool)."""
        place = {block: index for index, block in enumerate(pool.queue())}
        for block, key in enumerate(self.keys):
            parent, content = self.parents[block], self.contents[block]
            if parent is None or content is None:
                if key is not None or parent is not content or pool.is_cached(block):
                    raise IntegrityError(f"block {block} is kept, but holds nothing")
                continue
            if key is None:
                if len(content) >= self._block_bytes or not pool.is_cached(block):
                    raise IntegrityError(f"block {block} is a tail, but full or in use")
            elif self._table.get(key) != block or len(content) != self._block_bytes:
                raise IntegrityError(f"block {block} is not what its key finds")
            if block not in self.siblings.of(parent):
                raise IntegrityError(f"block {block} is not among its siblings")
            if isinstance(parent, int):
                if self.keys[parent] is None:
                    raise IntegrityError(f"block {block} outlives its parent {parent}")
                # A used block has a used parent; an idle one stands before its parent in the queue.
                if parent in place and place.get(block, self._num_blocks) > place[parent]:
                    raise IntegrityError(f"block {block} would outlive its parent {parent}")
        if len(self._table) != sum(key is not None for key in self.keys):
            raise IntegrityError("the table holds keys of no block")
        if len(self.siblings) != sum(content is not None for content in self.contents):
            raise IntegrityError("there are siblings that hold nothing")
