"""KV blocks that outlive their request, found again by the chained key of their content.

    sequence.keys       [ k0 | k1 | k2 | k3 ]          full blocks only; each key covers the whole prefix
    sequence.block_ids  [ 17 |  4 |  9 | 23 | 30 ]     30 is not full yet
                          '- registered -'    '- private: computed, not (or not yet) in the table

A block is *registered* once it is full, computed, and its parent is registered: so what is held is prefix-closed.
A registered block is shared by reference, never copied; on every hit its tokens and its parent are compared, so that
a collision of keys is a miss and never someone else's KV. Sequences give blocks back tail first, which makes eviction
leaf-only (see `block_pool`).

Keys that an admitted sequence is about to compute are *claimed*: whoever needs the same block next can wait for it
instead of computing it again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from replica.block_pool import BlockPool, IntegrityError
from replica.sequence import Sequence
from shared.blocks import BlockKey, block_keys

__all__ = ["CacheEvents", "Hasher", "PrefixCache", "PrefixMatch", "ResetResult"]

Hasher = Callable[[BlockKey, list[int], int], list[BlockKey]]
"""Keys of the full blocks of tokens that follow a parent: `shared.blocks.block_keys`, or something weaker in a test."""

Parent = BlockKey | int
"""What a block continues: another block, by its id, or (for a first block) its namespace root."""

_TOKEN_BYTES = array("I").itemsize


class CacheEvents(NamedTuple):
    """Net change since the last events: disjoint, parents stored before children, children removed before parents."""

    stored: list[BlockKey]
    removed: list[BlockKey]


class PrefixMatch(NamedTuple):
    """The longest held prefix of a sequence, and the key worth waiting for if someone computes what comes next."""

    block_ids: list[int]
    awaited_key: BlockKey | None


class ResetResult(NamedTuple):
    removed_blocks: int
    held_blocks: int
    """Still published, since running sequences use them."""


class PrefixCache:
    """Owns the block ids of one KV pool. One thread only; `hasher` is replaceable to provoke collisions."""

    def __init__(self, num_blocks: int, block_size: int, hasher: Hasher = block_keys) -> None:
        if block_size < 1:
            raise ValueError(f"a block holds at least one token, not {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.evicted_blocks = 0
        """Given to someone else since the start; a reset does not count."""
        self._hasher = hasher
        self._block_bytes = block_size * _TOKEN_BYTES
        self._stored: dict[BlockKey, None] = {}
        self._removed: dict[BlockKey, None] = {}
        self._open_books()

    def _open_books(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self._table: dict[BlockKey, int] = {}  # a parent always enters before its children and leaves after them
        self._key: list[BlockKey | None] = [None] * self.num_blocks
        self._parent: list[Parent | None] = [None] * self.num_blocks
        self._content: list[bytes | None] = [None] * self.num_blocks
        self._claims: dict[BlockKey, Sequence] = {}

    @property
    def held_blocks(self) -> int:
        """Registered blocks, in use or not."""
        return len(self._table)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def held_keys(self, limit: int | None = None) -> list[BlockKey]:
        """Keys of registered blocks, parents before children."""
        return list(islice(self._table, limit))

    def is_claimed(self, key: BlockKey) -> bool:
        return key in self._claims

    def match(self, sequence: Sequence) -> PrefixMatch:
        """Changes nothing but the sequence's memo of keys. The last token is never part of a match."""
        keys = self._keys_of(sequence)
        usable = (len(sequence.tokens) - 1) // self.block_size
        block_ids = []
        for key in islice(keys, usable):
            block = self._table.get(key)
            if block is None:
                break
            block_ids.append(block)
        same = self._same_content(sequence, block_ids)
        return PrefixMatch(block_ids[:same], self._last_claimed(keys[same:usable]))

    def allocate(self, sequence: Sequence, match: PrefixMatch, spare_blocks: int = 0) -> bool:
        """Give a sequence blocks for all its tokens, the matched ones by reference. `match` is fresh.

        False, and nothing done, unless `spare_blocks` more could be given afterwards.
        """
        assert not sequence.block_ids, f"{sequence.request_id} already has blocks"
        pool = self.pool
        hit = len(match.block_ids)
        missing = self.blocks_for(len(sequence.tokens)) - hit
        revived = sum(1 for block in match.block_ids if not pool.references[block])
        if missing + spare_blocks > pool.idle_blocks - revived:
            return False
        for block in match.block_ids:
            pool.share(block)
        sequence.block_ids = [*match.block_ids, *(self._take() for _ in range(missing))]
        sequence.registered_blocks = hit
        sequence.computed_tokens = hit * self.block_size
        for key in islice(sequence.keys, hit, None):
            self._claims.setdefault(key, sequence)
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Blocks for all tokens of a sequence that has some already. False, and nothing done, if there are too few."""
        missing = self.blocks_for(len(sequence.tokens)) - len(sequence.block_ids)
        if missing > self.pool.idle_blocks:
            return False
        sequence.block_ids.extend(self._take() for _ in range(missing))
        return True

    def register(self, sequence: Sequence) -> None:
        """Make the blocks that are now full and computed available to others.

        If somebody registered the same content meanwhile, the sequence goes on with that block and its own copy is
        free at once; so a sequence's registered blocks are always one chain of the table. If a key is taken by other
        content (a collision), this block and all after it stay private.
        """
        first = sequence.registered_blocks
        full = sequence.computed_tokens // self.block_size
        if first >= full:
            return
        keys = self._keys_of(sequence)
        content = _pack(sequence.tokens[first * self.block_size : full * self.block_size])
        parent: Parent = sequence.block_ids[first - 1] if first else sequence.root
        for index in range(first, full):
            start = (index - first) * self._block_bytes
            registered = self._register_block(
                sequence.block_ids[index], keys[index], parent, content[start : start + self._block_bytes]
            )
            if registered is None:
                self._unclaim(sequence)
                return
            self._claims.pop(keys[index], None)
            sequence.block_ids[index] = parent = registered
            sequence.registered_blocks = index + 1

    def free(self, sequence: Sequence) -> None:
        """Give every block back, tail first. The sequence can be admitted again, from its first token."""
        self._unclaim(sequence)
        for block in reversed(sequence.block_ids):
            self.pool.release(block, keep=self._key[block] is not None)
        sequence.block_ids = []
        sequence.registered_blocks = 0
        sequence.computed_tokens = 0

    def reset(self) -> ResetResult:
        """Forget every block that no sequence uses."""
        forgotten = [block for block in reversed(self._table.values()) if not self.pool.references[block]]
        for block in forgotten:
            self._unregister(block)
            self.pool.share(block)
            self.pool.release(block, keep=False)
        return ResetResult(len(forgotten), len(self._table))

    def start_over(self) -> None:
        """Forget everything, in whatever state it is: the way out when `check_integrity` failed."""
        for key in reversed(self._table):
            self._note_removed(key)
        self._open_books()

    def take_events(self) -> CacheEvents:
        events = CacheEvents(list(self._stored), list(self._removed))
        self._stored.clear()
        self._removed.clear()
        return events

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises IntegrityError unless all books agree, given all `sequences` that hold blocks. O(pool)."""
        self.pool.check_integrity()
        references = [0] * self.num_blocks
        for sequence in sequences:
            for index, block in enumerate(sequence.block_ids):
                references[block] += 1
                registered = index < sequence.registered_blocks
                if registered != (self._key[block] is not None):
                    raise IntegrityError(f"block {block} of {sequence.request_id}: registered is {not registered}")
                if registered and self._parent[block] != (sequence.block_ids[index - 1] if index else sequence.root):
                    raise IntegrityError(f"block {block} of {sequence.request_id} continues another block")
        if references != self.pool.references:
            raise IntegrityError("references differ from what the sequences hold")
        place = {block: index for index, block in enumerate(self.pool.queue())}
        for block, key in enumerate(self._key):
            if key is None:
                if self.pool.is_cached(block) or self._parent[block] is not None or self._content[block] is not None:
                    raise IntegrityError(f"block {block} has no key but is kept")
                continue
            if self._table.get(key) != block or self._content[block] is None:
                raise IntegrityError(f"block {block} is not what its key finds")
            parent = self._parent[block]
            if isinstance(parent, int):
                if self._key[parent] is None:
                    raise IntegrityError(f"block {block} outlives its parent {parent}")
                # A used block has a used parent; an idle one stands before its parent in the queue.
                if parent in place and place.get(block, self.num_blocks) > place[parent]:
                    raise IntegrityError(f"block {block} would outlive its parent {parent}")
        if len(self._table) != sum(key is not None for key in self._key):
            raise IntegrityError("the table holds keys of no block")
        if not all(claimant.block_ids for claimant in self._claims.values()):
            raise IntegrityError("a sequence without blocks claims to compute some")

    def _keys_of(self, sequence: Sequence) -> list[BlockKey]:
        keys = sequence.keys
        known = len(keys) * self.block_size
        if len(sequence.tokens) - known >= self.block_size:
            parent = keys[-1] if keys else sequence.root
            keys.extend(self._hasher(parent, sequence.tokens[known:], self.block_size))
        return keys

    def _same_content(self, sequence: Sequence, block_ids: list[int]) -> int:
        """How many of the blocks that the keys found really hold this sequence's tokens, each after the one before."""
        content = _pack(sequence.tokens[: len(block_ids) * self.block_size])
        size = self._block_bytes
        parent: Parent = sequence.root
        for index, block in enumerate(block_ids):
            if self._parent[block] != parent or self._content[block] != content[index * size : (index + 1) * size]:
                return index
            parent = block
        return len(block_ids)

    def _last_claimed(self, keys: list[BlockKey]) -> BlockKey | None:
        """The last of the leading keys that somebody computes: when that one is there, so are those before it."""
        last = None
        for key in keys:
            if key not in self._claims:
                break
            last = key
        return last

    def _register_block(self, block: int, key: BlockKey, parent: Parent, content: bytes) -> int | None:
        """The block that now stands for this content: `block`, or the one that already did. None on a collision."""
        known = self._table.get(key)
        if known is None:
            self._table[key] = block
            self._key[block], self._parent[block], self._content[block] = key, parent, content
            self._note_stored(key)
            return block
        if self._parent[known] != parent or self._content[known] != content:
            return None
        self.pool.share(known)
        self.pool.release(block, keep=False)
        return known

    def _take(self) -> int:
        block = self.pool.take()
        if self._key[block] is not None:
            self._unregister(block)
            self.evicted_blocks += 1
        return block

    def _unregister(self, block: int) -> None:
        key = self._key[block]
        assert key is not None
        del self._table[key]
        self._key[block] = self._parent[block] = self._content[block] = None
        self._note_removed(key)

    def _unclaim(self, sequence: Sequence) -> None:
        for key in islice(sequence.keys, sequence.registered_blocks, None):
            if self._claims.get(key) is sequence:
                del self._claims[key]

    def _note_stored(self, key: BlockKey) -> None:
        if key in self._removed:
            del self._removed[key]
        else:
            self._stored[key] = None

    def _note_removed(self, key: BlockKey) -> None:
        if key in self._stored:
            del self._stored[key]
        else:
            self._removed[key] = None


def _pack(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()
