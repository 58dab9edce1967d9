"""KV blocks that outlive their request, found again by the chained key of their content.

    sequence.keys       [ k0 | k1 | k2 | k3 ]          full blocks only; each key covers the whole prefix
    sequence.block_ids  [ 17 |  4 |  9 | 23 | 30 ]     30 is not full yet
                          '- registered -'    '- private: computed, not (or not yet) in the table

A block is *registered* once it is full, computed, and its parent is registered: so what is held is prefix-closed.
A registered block is shared by reference, never copied; on every hit its tokens and its parent are compared, so that
a collision of keys is a miss and never someone else's KV. Sequences give blocks back tail first, which makes eviction
leaf-only (see `block_pool`).

Keys that an admitted sequence is about to compute are *claimed*: whoever needs the same block next waits for it instead
of computing it again.

What goes beyond whole blocks on the device is optional. It moves blocks, so a step begins by carrying out `take_moves`:

    finer       held    [ a b c d | e f g h ]     where a prompt ends inside a cached block, or leaves it there, the
                prompt  [ a b c d | e f x y ]     part that it shares (e f) is copied into a block of its own. Blocks
                                                  that were not full when their sequence ended are kept for this.
    host tier   what is evicted moves to host memory, and comes back on a hit (see `host_tier`)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from itertools import islice
from typing import NamedTuple

from replica.block_moves import Copy, Move, Offload, Onload
from replica.block_pool import BlockPool, IntegrityError
from replica.cache_events import CacheEvents, TierChanges
from replica.claims import Claims
from replica.crossover import WorthOnloading
from replica.held_blocks import HeldBlocks
from replica.host_tier import HostTier
from replica.prefix_match import PrefixMatch
from replica.retention import Retention
from replica.sequence import Sequence
from replica.siblings import TOKEN_BYTES, Parent, Sibling, pack_tokens
from shared.blocks import BlockKey, block_keys

__all__ = ["CacheEvents", "Hasher", "PrefixCache", "PrefixMatch", "ResetResult"]

Hasher = Callable[[BlockKey, list[int], int], list[BlockKey]]
"""Keys of the full blocks of tokens that follow a parent: `shared.blocks.block_keys`, or something weaker in a test."""

_LEAST_PART_TOKENS = 8
"""Fewer are not worth a copy: prompts that have nothing in common still begin with the same template. In blocks below
twice that, half a block."""


class ResetResult(NamedTuple):
    removed_blocks: int
    held_blocks: int
    """Still published, since running sequences use them."""


class PrefixCache:
    """Owns the block ids of one KV pool, and of the host pool behind it. One thread only.

    `finer` reuses parts of blocks, `host_blocks` is the host pool's size. Up to `retained_share` of the device's blocks
    may be kept longer by wish, in `clock`'s seconds. `hasher` is replaceable to provoke collisions.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hasher: Hasher = block_keys,
        *,
        finer: bool = False,
        host_blocks: int = 0,
        worth_onloading: WorthOnloading = lambda tokens, behind: True,
        retained_share: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"a block holds at least one token, not {block_size}")
        self.num_blocks = num_blocks
        self.host_blocks = host_blocks
        self.block_size = block_size
        self.evictions: Counter[str] = Counter()
        """Blocks that stopped being held where they were since the start, by the reason."""
        self._finer = finer
        self._hasher = hasher
        self._worth_onloading = worth_onloading
        self._retained_blocks = int(num_blocks * retained_share)
        self._clock = clock
        self._block_bytes = block_size * TOKEN_BYTES
        self._least_part_tokens = min(_LEAST_PART_TOKENS, max(1, block_size // 2))
        self._changes, self._host_changes = TierChanges(), TierChanges()
        self._open_books()

    def _open_books(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.held = HeldBlocks(self.num_blocks, self.block_size)
        self.host = HostTier(self.host_blocks, self._host_changes)
        self.retention = Retention(self._retained_blocks, self._clock)
        self._claims = Claims()
        self._moves: list[Move] = []

    @property
    def held_blocks(self) -> int:
        """Registered blocks, in use or not."""
        return len(self.held)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def held_keys(self, limit: int | None = None) -> list[BlockKey]:
        """Keys of registered blocks, parents before children."""
        return list(islice(self.held, limit))

    def is_claimed(self, key: BlockKey) -> bool:
        return key in self._claims

    def match(self, sequence: Sequence) -> PrefixMatch:
        """Changes nothing but the sequence's memo of keys. The last token is never part of a match."""
        keys = self._keys_of(sequence)
        usable = (len(sequence.tokens) - 1) // self.block_size
        block_ids = []
        for key in islice(keys, usable):
            block = self.held.find(key)
            if block is None:
                break
            block_ids.append(block)
        same = self._same_content(sequence, block_ids)
        del block_ids[same:]
        host_keys = self._on_host(sequence, same, usable)
        awaited_key = self._claims.last_of(keys[same + len(host_keys) : usable])
        partial = None if host_keys or awaited_key is not None else self._partial(sequence, block_ids)
        return PrefixMatch(block_ids, awaited_key, host_keys, partial)

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
        self._end_retention()
        for block in match.block_ids:
            pool.share(block)
        sequence.block_ids = list(match.block_ids)
        self._bring_back(sequence, match.host_keys)
        sequence.registered_blocks = len(sequence.block_ids)
        sequence.computed_tokens = sequence.registered_blocks * self.block_size
        if match.partial is not None:
            self._copy(sequence, match.partial)
        while len(sequence.block_ids) < hit + missing:
            sequence.block_ids.append(self._take())
        self._claims.claim(sequence)
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
        content = pack_tokens(sequence.tokens[first * self.block_size : full * self.block_size])
        for index in range(first, full):
            parent = sequence.continued(index, sequence.block_ids)
            start = (index - first) * self._block_bytes
            registered = self._register_block(
                sequence.block_ids[index], keys[index], parent, content[start : start + self._block_bytes]
            )
            if registered is None:
                self._claims.give_up(sequence)
                return
            self._claims.settle(keys[index])
            sequence.block_ids[index] = registered
            sequence.registered_blocks = index + 1

    def free(self, sequence: Sequence) -> None:
        """Give every block back, tail first. The sequence can be admitted again, from its first token."""
        self._claims.give_up(sequence)
        if sequence.keep_seconds > 0:
            prompt_blocks = min(sequence.registered_blocks, sequence.prompt_tokens // self.block_size)
            self.retention.keep(sequence.block_ids[:prompt_blocks], sequence.keep_seconds)
        if self._finer:
            self._keep_tail(sequence)
        for block in reversed(sequence.block_ids):
            keep = self.held.contents[block] is not None
            self.pool.release(block, keep=keep, retain=block in self.retention)
        sequence.block_ids = []
        sequence.registered_blocks = 0
        sequence.computed_tokens = 0

    def reset(self) -> ResetResult:
        """Forget every block that no sequence uses, and all in host memory."""
        before = len(self.held) + len(self.host)
        self.host.clear()
        for block in self.pool.queue():
            if self.pool.is_cached(block):
                self._drop(block)
                self.pool.requeue(block, keep=False)
        removed = before - len(self.held)
        self.evictions["reset"] += removed
        return ResetResult(removed, len(self.held))

    def start_over(self) -> None:
        """Forget everything, in whatever state it is: the way out when `check_integrity` failed."""
        self.host.clear()
        for key in reversed(self.held):
            self._changes.remove(key)
        self._open_books()

    def take_moves(self) -> list[Move]:
        """What has to be carried out, in this order, before the next step computes."""
        moves, self._moves = self._moves, []
        return moves

    def take_events(self) -> CacheEvents:
        return CacheEvents(*self._changes.take(), *self._host_changes.take())

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises IntegrityError unless all books agree, given all `sequences` that hold blocks. O(pool)."""
        self.pool.check_integrity()
        references = [0] * self.num_blocks
        for sequence in sequences:
            for index, block in enumerate(sequence.block_ids):
                references[block] += 1
                registered = index < sequence.registered_blocks
                if registered != (self.held.keys[block] is not None):
                    raise IntegrityError(f"block {block} of {sequence.request_id}: registered is {not registered}")
                parent = sequence.continued(index, sequence.block_ids)
                if registered and self.held.parents[block] != parent:
                    raise IntegrityError(f"block {block} of {sequence.request_id} continues another block")
        if references != self.pool.references:
            raise IntegrityError("references differ from what the sequences hold")
        self.held.check_integrity(self.pool)
        self.host.check_integrity(self.held.find)
        self.retention.check_integrity(self.held.parents)
        self._claims.check_integrity()

    # -- what a prompt finds ---------------------------------------------------------------------------------------

    def _keys_of(self, sequence: Sequence) -> list[BlockKey]:
        keys, size = sequence.keys, self.block_size
        full = len(sequence.tokens) // size
        while len(keys) < full:
            known = len(keys)
            # Up to where it leaves the blocks that all tenants share, if it does; then to the end.
            end = full if sequence.branch is None or known >= sequence.branch.blocks else sequence.branch.blocks
            tokens = sequence.tokens[known * size : min(end, full) * size]
            keys.extend(self._hasher(sequence.continued(known, keys), tokens, size))
        return keys

    def _same_content(self, sequence: Sequence, block_ids: list[int]) -> int:
        """How many of the blocks that the keys found really hold this sequence's tokens, each after the one before."""
        content = pack_tokens(sequence.tokens[: len(block_ids) * self.block_size])
        size = self._block_bytes
        for index, block in enumerate(block_ids):
            parent = sequence.continued(index, block_ids)
            if not self.held.has(block, parent, content[index * size : (index + 1) * size]):
                return index
        return len(block_ids)

    def _on_host(self, sequence: Sequence, first: int, usable: int) -> list[BlockKey]:
        """Keys of the blocks from `first` on that host memory holds, compared likewise; none if not worth the way."""
        size, found = self.block_size, []
        for index in range(first, usable) if len(self.host) else ():
            key = sequence.keys[index]
            parent_key = sequence.continued(index, sequence.keys)
            if not self.host.has(key, parent_key, pack_tokens(sequence.tokens[index * size : (index + 1) * size])):
                break
            found.append(key)
        return found if found and self._worth_onloading(len(found) * size, first * size) else []

    def _partial(self, sequence: Sequence, block_ids: list[int]) -> Sibling | None:
        if not self._finer:
            return None
        start = len(block_ids) * self.block_size
        wanted = sequence.tokens[start : min(start + self.block_size, len(sequence.tokens) - 1)]
        closest = self.held.siblings.closest(sequence.continued(len(block_ids), block_ids), pack_tokens(wanted))
        return closest if closest is not None and closest.tokens >= self._least_part_tokens else None

    # -- what becomes of blocks ------------------------------------------------------------------------------------

    def _bring_back(self, sequence: Sequence, host_keys: Items[BlockKey]) -> None:
        # First all are taken: what makes room for one of them must not push out another.
        for key, there in [(key, self.host.take(key)) for key in host_keys]:
            parent = sequence.continued(len(sequence.block_ids), sequence.block_ids)
            block = self._take()
            self._moves.append(Onload(there.place, block))
            self.host.release(there)
            self._hold(block, key, parent, there.content)
            sequence.block_ids.append(block)

    def _copy(self, sequence: Sequence, partial: Sibling) -> None:
        source, tokens = partial
        # It was of use: it goes last of what is idle. Its parent is in use, so children still go before parents.
        self.pool.requeue(source, keep=True, retain=source in self.retention)
        block = self._take()
        if block != source:  # in a full pool it may be the only block left
            self._moves.append(Copy(source, block, tokens))
        sequence.block_ids.append(block)
        sequence.computed_tokens += tokens

    def _register_block(self, block: int, key: BlockKey, parent: Parent, content: bytes) -> int | None:
        """The block that now stands for this content: `block`, or the one that already did. None on a collision."""
        known = self.held.find(key)
        if known is None:
            if key in self.host:
                if not self.host.has(key, self.held.parent_key(parent), content):
                    return None
                self.host.release(self.host.take(key))
            self._hold(block, key, parent, content)
            return block
        if not self.held.has(known, parent, content):
            return None
        self.pool.share(known)
        self.pool.release(block, keep=False)
        return known

    def _hold(self, block: int, key: BlockKey, parent: Parent, content: bytes) -> None:
        if self._finer:
            self._drop_tail_within(parent, content)
        self.held.add(block, key, parent, content)
        self._changes.store(key)

    def _keep_tail(self, sequence: Sequence) -> None:
        """The computed part of a sequence's last block, unless another block says as much."""
        full = sequence.registered_blocks
        tokens = sequence.tokens[full * self.block_size : sequence.computed_tokens]
        if not self._least_part_tokens <= len(tokens) < self.block_size:
            return
        parent, content = sequence.continued(full, sequence.block_ids), pack_tokens(tokens)
        closest = self.held.siblings.closest(parent, content)
        if closest is None or closest.tokens < len(tokens):
            self._drop_tail_within(parent, content)
            self.held.add(sequence.block_ids[full], None, parent, content)

    def _drop_tail_within(self, parent: Parent, content: bytes) -> None:
        tail = self.held.tail_within(parent, content)
        if tail is not None:
            self._drop(tail)
            self.pool.requeue(tail, keep=False)

    def _take(self) -> int:
        block = self.pool.take()
        if self.held.contents[block] is not None:
            self._evict(block)
        return block

    def _evict(self, block: int) -> None:
        reason = "tail" if self.held.is_tail(block) else "capacity"
        if reason == "capacity" and self.host_blocks and self._offload(block):
            reason = "to_host"
        self.evictions[reason] += 1
        self._drop(block)

    def _offload(self, block: int) -> bool:
        key, parent, content = self.held.keys[block], self.held.parents[block], self.held.contents[block]
        assert key is not None
        assert parent is not None
        assert content is not None
        # Only children of this one may be given up for it, or others that are older; never what it continues.
        there = self.host.put(key, self.held.parent_key(parent), content)
        if there is None:
            return False
        self.evictions["host_capacity"] += there.pushed_out
        self._moves.append(Offload(block, there.place))
        return True

    def _drop(self, block: int) -> None:
        key = self.held.keys[block]
        self.held.drop(block)
        self.retention.forget(block)
        if key is not None:
            self._changes.remove(key)

    def _end_retention(self) -> None:
        for block in self.retention.take_ended():
            self.pool.requeue(block, keep=True)
