"""The prefix cache against a naive model that knows prefixes by their tokens and searches by brute force.

The model also has a memory, which moves and computations write to: a slot says which tokens it stands for.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replica.block_moves import Copy, Offload, Onload, carry_out
from replica.prefix_cache import PrefixCache
from replica.sequence import Sequence
from shared.blocks import BlockKey, block_keys
from tests.replica.pool_runner import ROOT, make_sequence

SIZE = 3
BLOCKS = 8
GRAIN = 5
NOTHING: tuple[int, ...] = (-1,)

Prefix = tuple[int, ...]

# Runs of equal tokens: beginnings meet again, at every depth and inside of blocks.
runs = st.tuples(st.integers(0, 1), st.sampled_from([1, 2, 3, 3, 6, 7]))
prompts = st.lists(runs, min_size=1, max_size=4).map(
    lambda drawn: [token for token, length in drawn for _ in range(length)][: SIZE * BLOCKS]
)
picks = st.integers(0, 1_000)


def shared_tokens(left: Items[int], right: Items[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


@dataclass
class Holder:
    """A live sequence, and how many of its leading blocks the model says are held."""

    sequence: Sequence
    held: int


class Memory:
    """Device and host slots, each the tuple of tokens that it depends on."""

    def __init__(self, host_blocks: int) -> None:
        self.device = [[NOTHING] * SIZE for _ in range(BLOCKS)]
        self.host = [[NOTHING] * SIZE for _ in range(host_blocks)]

    def copy_blocks(self, moves: Items[Copy]) -> None:
        for move in reversed(moves):  # in any order
            self.device[move.target] = self.device[move.source][: move.tokens] + [NOTHING] * (SIZE - move.tokens)

    def offload_blocks(self, moves: Items[Offload]) -> float:
        for move in reversed(moves):
            self.host[move.target] = list(self.device[move.source])
        return 0.0

    def onload_blocks(self, moves: Items[Onload]) -> float:
        for move in reversed(moves):
            self.device[move.target] = list(self.host[move.source])
        return 0.0

    def compute(self, sequence: Sequence, start: int, end: int) -> None:
        for position in range(start, end):
            block = sequence.block_ids[position // SIZE]
            self.device[block][position % SIZE] = tuple(sequence.tokens[: position + 1])


class CacheAgainstModel(RuleBasedStateMachine):
    finer = False
    host_blocks = 0
    retained_blocks = 0

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.worth_onloading = True
        self.cache = PrefixCache(
            BLOCKS,
            SIZE,
            finer=self.finer,
            host_blocks=self.host_blocks,
            worth_onloading=lambda tokens, behind: self.worth_onloading,
            retained_share=self.retained_blocks / BLOCKS,
            clock=lambda: self.now,
        )
        self.memory = Memory(self.host_blocks)
        self.held: set[Prefix] = set()  # full blocks of the device
        self.idle: list[Prefix] = []  # held and unused, and tails, least recently used first
        self.kept_idle: list[Prefix] = []  # the same, of those that are retained
        self.until: dict[Prefix, float] = {}
        self.host: list[Prefix] = []  # oldest arrival first
        self.live: list[Holder] = []
        self.published: set[BlockKey] = set()
        self.host_published: set[BlockKey] = set()

    # -- what the model knows --------------------------------------------------------------------------------------

    def _prefix(self, sequence: Sequence, blocks: int) -> Prefix:
        return tuple(sequence.tokens[: blocks * SIZE])

    def _chain(self, holder: Holder) -> list[Prefix]:
        return [self._prefix(holder.sequence, n) for n in range(1, holder.held + 1)]

    def _used(self) -> int:
        shared = {prefix for holder in self.live for prefix in self._chain(holder)}
        return len(shared) + sum(len(holder.sequence.block_ids) - holder.held for holder in self.live)

    def _idle(self) -> list[Prefix]:
        return self.idle + self.kept_idle

    def _tails(self) -> list[Prefix]:
        return [prefix for prefix in self.idle if len(prefix) % SIZE]

    def _children(self, parent: Prefix) -> list[Prefix]:
        longer = [prefix for prefix in (*self.held, *self._tails()) if prefix[: len(parent)] == parent]
        return [prefix for prefix in longer if 0 < len(prefix) - len(parent) <= SIZE]

    def _forget_idle(self, gone: set[Prefix]) -> None:
        self.idle = [prefix for prefix in self.idle if prefix not in gone]
        self.kept_idle = [prefix for prefix in self.kept_idle if prefix not in gone]

    def _drop_tail_within(self, prefix: Prefix) -> None:
        parent = prefix[: (len(prefix) - 1) // SIZE * SIZE]
        within = [tail for tail in self._tails() if tail[: len(parent)] == parent and prefix[: len(tail)] == tail]
        self._forget_idle({tail for tail in within if len(tail) > len(parent)})

    def _hand_out(self, blocks: int, used_before: int, host_in_transit: int = 0) -> None:
        """Evict for `blocks` more, oldest first; whatever goes must be a leaf."""
        free = BLOCKS - used_before - len(self._idle())
        for _ in range(blocks - free):
            queue = self.idle or self.kept_idle
            victim = queue.pop(0)
            self.until.pop(victim, None)
            others = self.held | set(self._tails())
            assert not any(other != victim and other[: len(victim)] == victim for other in others)
            if len(victim) % SIZE:
                continue
            self.held.remove(victim)
            if self.host_blocks > host_in_transit:
                self.host.append(victim)
                if len(self.host) > self.host_blocks - host_in_transit:
                    out = self.host.pop(0)
                    assert not any(other[: len(out)] == out for other in (*self.host, *self.held))

    def _end_retention(self) -> None:
        for prefix in [prefix for prefix, end in reversed(self.until.items()) if end <= self.now]:
            del self.until[prefix]
            if prefix in self.kept_idle:
                self.kept_idle.remove(prefix)
                self.idle.append(prefix)

    # -- what happens ----------------------------------------------------------------------------------------------

    @rule(prompt=prompts, keep_seconds=st.sampled_from([0, 0, 5, 10]))
    def serve(self, prompt: list[int], keep_seconds: float) -> None:
        """A whole request, so that the pool turns over."""
        before = len(self.live)
        self.admit(prompt, True, keep_seconds)
        if len(self.live) > before:
            self.compute(before, SIZE * BLOCKS)
            self.free(before)

    @rule(prompt=prompts, worth=st.booleans(), keep_seconds=st.sampled_from([0, 0, 5, 10]))
    def admit(self, prompt: list[int], worth: bool, keep_seconds: float) -> None:
        self.worth_onloading = worth
        sequence = make_sequence(prompt)
        sequence.keep_seconds = keep_seconds
        hit = back = 0
        while (hit + 1) * SIZE < len(prompt) and self._prefix(sequence, hit + 1) in self.held:
            hit += 1
        while worth and (hit + back + 1) * SIZE < len(prompt) and self._prefix(sequence, hit + back + 1) in self.host:
            back += 1
        match = self.cache.match(sequence)
        assert len(match.block_ids) == hit
        assert len(list(match.host_keys)) == back
        matched = [self._prefix(sequence, n) for n in range(1, hit + 1)]
        source = None
        if self.finer and not back and match.awaited_key is None:
            source = self._best_partial(match.partial, self._prefix(sequence, hit), prompt)
        else:
            assert match.partial is None
        used = self._used() + sum(prefix in self._idle() for prefix in matched)
        missing = self.cache.blocks_for(len(prompt)) - hit
        fits = missing <= BLOCKS - used
        assert self.cache.allocate(sequence, match) is fits
        if not fits:
            return
        self._end_retention()
        self._forget_idle(set(matched))
        self._bring_back([self._prefix(sequence, hit + n) for n in range(1, back + 1)], used)
        for queue in (self.idle, self.kept_idle):
            if source in queue:
                queue.remove(source)
                queue.append(source)
        self._hand_out(missing - back, used + back)
        self.live.append(Holder(sequence, hit + back))
        partial = match.partial.tokens if match.partial else 0
        assert sequence.computed_tokens == (hit + back) * SIZE + partial < len(prompt)

    def _bring_back(self, chain: list[Prefix], used: int) -> None:
        self.host = [prefix for prefix in self.host if prefix not in chain]
        for n, prefix in enumerate(chain):
            self._hand_out(1, used + n, host_in_transit=len(chain) - n)
            self._drop_tail_within(prefix)
            self.held.add(prefix)

    def _best_partial(self, found: tuple[int, int] | None, parent: Prefix, prompt: list[int]) -> Prefix | None:
        """The child that the cache chose, which must be one of the best."""
        wanted = prompt[len(parent) : min(len(parent) + SIZE, len(prompt) - 1)]
        best = max((shared_tokens(child[len(parent) :], wanted) for child in self._children(parent)), default=0)
        if not best:
            assert found is None
            return None
        assert found is not None
        block, tokens = found
        content = self.cache.held.contents[block]
        assert content is not None
        chosen = parent + tuple(array("I", content))
        assert chosen in self._children(parent)
        assert tokens == best == shared_tokens(chosen[len(parent) :], wanted)
        return chosen

    @precondition(lambda self: self.live)
    @rule(pick=picks, tokens=st.integers(1, SIZE * BLOCKS))
    def compute(self, pick: int, tokens: int) -> None:
        carry_out(self.memory, self.cache.take_moves())
        holder = self.live[pick % len(self.live)]
        sequence = holder.sequence
        start = sequence.computed_tokens
        sequence.computed_tokens = min(len(sequence.tokens), start + tokens)
        self.memory.compute(sequence, start, sequence.computed_tokens)
        self.cache.register(sequence)
        full = sequence.computed_tokens // SIZE
        for n in range(holder.held + 1, full + 1):
            prefix = self._prefix(sequence, n)
            self._forget_idle({prefix})
            if prefix not in self.held:
                self._drop_tail_within(prefix)
                self.held.add(prefix)
            if prefix in self.host:
                self.host.remove(prefix)
        holder.held = max(holder.held, full)

    @precondition(lambda self: any(h.sequence.uncomputed_tokens == 0 for h in self.live))
    @rule(pick=picks, token=st.integers(0, 1))
    def extend(self, pick: int, token: int) -> None:
        ready = [holder for holder in self.live if holder.sequence.uncomputed_tokens == 0]
        sequence = ready[pick % len(ready)].sequence
        used = self._used()
        sequence.tokens.append(token)
        missing = self.cache.blocks_for(len(sequence.tokens)) - len(sequence.block_ids)
        if self.cache.grow(sequence):
            self._hand_out(missing, used)
        else:
            assert used + missing > BLOCKS
            sequence.tokens.pop()

    @precondition(lambda self: self.live)
    @rule(pick=picks)
    def free(self, pick: int) -> None:
        holder = self.live.pop(pick % len(self.live))
        sequence = holder.sequence
        still_used = {prefix for other in self.live for prefix in self._chain(other)}
        chain = self._chain(holder)
        if sequence.keep_seconds:
            self._keep(chain[: sequence.prompt_tokens // SIZE], self.now + sequence.keep_seconds)
        parent = self._prefix(sequence, holder.held)
        tail = tuple(sequence.tokens[: sequence.computed_tokens])
        new = [shared_tokens(child, tail) < len(tail) for child in self._children(parent)]
        if self.finer and len(parent) < len(tail) and all(new):
            self._drop_tail_within(tail)
            self.idle.append(tail)
        for prefix in reversed(chain):
            if prefix not in still_used:
                (self.kept_idle if prefix in self.until else self.idle).append(prefix)
        self.cache.free(sequence)

    def _keep(self, chain: list[Prefix], end: float) -> None:
        end = math.ceil(end / GRAIN) * GRAIN
        for prefix in chain:
            if prefix not in self.until and len(self.until) >= self.retained_blocks:
                break
            self.until[prefix] = max(end, self.until.get(prefix, 0))

    @rule(seconds=st.integers(1, 4))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.held -= set(self._idle())
        self.until = {prefix: end for prefix, end in self.until.items() if prefix in self.held}
        self.idle.clear()
        self.kept_idle.clear()
        self.host.clear()

    @rule()
    def publish(self) -> None:
        events = self.cache.take_events()
        for stored, removed, published in (
            (events.stored, events.removed, self.published),
            (events.host_stored, events.host_removed, self.host_published),
        ):
            assert not set(stored) & published
            assert set(removed) <= published
            published -= set(removed)
            published |= set(stored)
        assert self.published == set(self.cache.held_keys())
        assert self.host_published == {key for key, _ in self.cache.host.items()}

    # -- what must hold --------------------------------------------------------------------------------------------

    @invariant()
    def both_agree(self) -> None:
        pool, keys = self.cache.pool, self._keys
        assert set(self.cache.held_keys()) == keys(self.held)
        assert [key for key, _ in self.cache.host.items()] == [block_keys(ROOT, p, SIZE)[-1] for p in self.host[::-1]]
        assert (pool.used_blocks, pool.cached_blocks) == (self._used(), len(self._idle()))
        assert pool.free_blocks + pool.cached_blocks + pool.used_blocks == BLOCKS
        assert len(self.cache.retention) == len(self.until)

    def _keys(self, prefixes: set[Prefix]) -> set[BlockKey]:
        return {block_keys(ROOT, prefix, SIZE)[-1] for prefix in prefixes}

    @invariant()
    def what_is_held_is_prefix_closed(self) -> None:
        assert all(len(prefix) == SIZE or prefix[:-SIZE] in self.held for prefix in self.held)
        union = self.held | set(self.host)
        assert len(union) == len(self.held) + len(self.host)
        assert all(len(prefix) == SIZE or prefix[:-SIZE] in union for prefix in union)

    @invariant()
    def memory_holds_what_the_cache_says(self) -> None:
        carry_out(self.memory, self.cache.take_moves())
        for block, content in enumerate(self.cache.held.contents):
            if content is not None:
                prefix = self._whole_prefix(block)
                first = len(prefix) - len(array("I", content))
                slots = self.memory.device[block]
                assert slots[: len(prefix) - first] == [prefix[: n + 1] for n in range(first, len(prefix))]
        for prefix, (_, there) in zip(reversed(self.host), self.cache.host.items(), strict=True):
            assert self.memory.host[there.place] == [prefix[: n + 1] for n in range(len(prefix) - SIZE, len(prefix))]
        for holder in self.live:
            tokens, block_ids = holder.sequence.tokens, holder.sequence.block_ids
            for position in range(holder.sequence.computed_tokens):
                slot = self.memory.device[block_ids[position // SIZE]][position % SIZE]
                assert slot == tuple(tokens[: position + 1])

    def _whole_prefix(self, block: int) -> Prefix:
        parent, content = self.cache.held.parents[block], self.cache.held.contents[block]
        assert content is not None
        return (self._whole_prefix(parent) if isinstance(parent, int) else ()) + tuple(array("I", content))

    @invariant()
    def integrity_holds(self) -> None:
        self.cache.check_integrity([holder.sequence for holder in self.live])


class FinerCache(CacheAgainstModel):
    finer = True


class TwoTiers(CacheAgainstModel):
    host_blocks = 4


class Retaining(CacheAgainstModel):
    retained_blocks = 4


class Everything(CacheAgainstModel):
    finer = True
    host_blocks = 5
    retained_blocks = 5


_MANY = settings(max_examples=150, stateful_step_count=40, deadline=None)

TestCacheAgainstModel = CacheAgainstModel.TestCase
TestFinerCache = FinerCache.TestCase
TestTwoTiers = TwoTiers.TestCase
TestRetaining = Retaining.TestCase
TestEverything = Everything.TestCase
TestCacheAgainstModel.settings = TestFinerCache.settings = TestTwoTiers.settings = _MANY
TestRetaining.settings = TestEverything.settings = _MANY
