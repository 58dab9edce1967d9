"""Cached blocks by what they continue, each family in the order of its content: finds who shares most with a prompt.

    parent 17   [ 5 5 9 1 | 5 5 9 8 | 5 7 0 0 | 8 1 1 2 ]
    wanted        5 5 9 9 ->      ^ ^ it would stand between these two, and one of them shares the longest beginning

In sorted order, whoever shares a beginning stands together; so a bisection and two comparisons find the best of
thousands. One entry per cached block, which goes with the block.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shared.blocks import BlockKey

__all__ = ["TOKEN_BYTES", "Parent", "Sibling", "Siblings", "pack_tokens"]

Parent = BlockKey | int
"""What a block continues: another block, by its id, or (for a first block) its namespace root."""

TOKEN_BYTES = array("I").itemsize


def pack_tokens(tokens: list[int]) -> bytes:
    """As blocks keep them: equal tokens, equal bytes."""
    return array("I", tokens).tobytes()


class Sibling(NamedTuple):
    """A cached block, and how many of its first tokens are those asked for."""

    block: int
    tokens: int


class Siblings:
    """`contents` are the packed tokens by block id: not ours, and set for as long as a block is in here."""

    def __init__(self, contents: Sequence[bytes | None]) -> None:
        self._contents = contents
        self._families: dict[Parent, list[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._families.values()))

    def add(self, parent: Parent, block: int) -> None:
        family = self._families.setdefault(parent, [])
        family.insert(self._place(family, self._content(block)), block)

    def discard(self, parent: Parent, block: int) -> None:
        family = self._families[parent]
        place = self._place(family, self._content(block))
        assert family[place] == block, f"block {block} is not among its siblings"
        del family[place]
        if not family:
            del self._families[parent]

    def of(self, parent: Parent) -> Sequence[int]:
        """All children, in the order of their content."""
        return self._families.get(parent, ())

    def roots(self) -> Iterable[BlockKey]:
        """Namespaces that hold anything. O(cached blocks)."""
        return [parent for parent in self._families if not isinstance(parent, int)]

    def closest(self, parent: Parent, content: bytes) -> Sibling | None:
        """The child that shares the longest beginning with `content`; None where none shares a token."""
        family = self._families.get(parent)
        if not family:
            return None
        place = self._place(family, content)
        near = (Sibling(block, self._shared_tokens(block, content)) for block in family[max(0, place - 1) : place + 1])
        best = max(near, key=lambda sibling: sibling.tokens)
        return best if best.tokens else None

    def before(self, parent: Parent, content: bytes) -> int | None:
        """The child right before where `content` stands or would stand."""
        family = self._families.get(parent, [])
        place = self._place(family, content)
        return family[place - 1] if place else None

    def _place(self, family: Sequence[int], content: bytes) -> int:
        return bisect_left(family, content, key=self._content)

    def _content(self, block: int) -> bytes:
        content = self._contents[block]
        assert content is not None, f"block {block} has no content"
        return content

    def _shared_tokens(self, block: int, content: bytes) -> int:
        other = self._content(block)
        length = min(len(other), len(content))
        difference = int.from_bytes(other[:length], "big") ^ int.from_bytes(content[:length], "big")
        return (length - (difference.bit_length() + 7) // 8) // TOKEN_BYTES
