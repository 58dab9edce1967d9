"""The prefix cache against a naive model that knows prefixes by their tokens and searches by brute force."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replica.prefix_cache import PrefixCache
from replica.sequence import Sequence
from shared.blocks import BlockKey, block_keys
from tests.replica.pool_runner import ROOT, make_sequence

SIZE = 2
BLOCKS = 9

Prefix = tuple[int, ...]

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=SIZE * BLOCKS)
picks = st.integers(0, 1_000)


@dataclass
class Holder:
    """A live sequence, and how many of its leading blocks the model says are held."""

    sequence: Sequence
    held: int


class CacheAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(BLOCKS, SIZE)
        self.held: set[Prefix] = set()
        self.idle: list[Prefix] = []  # held and unused, least recently used first
        self.live: list[Holder] = []
        self.published: set[BlockKey] = set()

    def _prefix(self, sequence: Sequence, blocks: int) -> Prefix:
        return tuple(sequence.tokens[: blocks * SIZE])

    def _chain(self, holder: Holder) -> list[Prefix]:
        return [self._prefix(holder.sequence, n) for n in range(1, holder.held + 1)]

    def _used(self) -> int:
        shared = {prefix for holder in self.live for prefix in self._chain(holder)}
        return len(shared) + sum(len(holder.sequence.block_ids) - holder.held for holder in self.live)

    def _hand_out(self, blocks: int, used_before: int) -> None:
        """Evict for `blocks` more, oldest first; whatever goes must be a leaf."""
        free = BLOCKS - used_before - len(self.idle)
        for _ in range(blocks - free):
            victim = self.idle.pop(0)
            assert not any(other != victim and other[: len(victim)] == victim for other in self.held)
            self.held.remove(victim)

    @rule(prompt=prompts)
    def admit(self, prompt: list[int]) -> None:
        sequence = make_sequence(prompt)
        hit = 0
        while (hit + 1) * SIZE < len(prompt) and self._prefix(sequence, hit + 1) in self.held:
            hit += 1
        match = self.cache.match(sequence)
        assert len(match.block_ids) == hit
        matched = [self._prefix(sequence, n) for n in range(1, hit + 1)]
        used = self._used() + sum(prefix in self.idle for prefix in matched)
        missing = self.cache.blocks_for(len(prompt)) - hit
        fits = missing <= BLOCKS - used
        assert self.cache.allocate(sequence, match) is fits
        if fits:
            self.idle = [prefix for prefix in self.idle if prefix not in matched]
            self._hand_out(missing, used)
            self.live.append(Holder(sequence, hit))

    @precondition(lambda self: self.live)
    @rule(pick=picks, tokens=st.integers(1, SIZE * BLOCKS))
    def compute(self, pick: int, tokens: int) -> None:
        holder = self.live[pick % len(self.live)]
        sequence = holder.sequence
        sequence.computed_tokens = min(len(sequence.tokens), sequence.computed_tokens + tokens)
        self.cache.register(sequence)
        full = sequence.computed_tokens // SIZE
        for n in range(holder.held + 1, full + 1):
            prefix = self._prefix(sequence, n)
            self.held.add(prefix)
            self.idle = [other for other in self.idle if other != prefix]
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
        still_used = {prefix for other in self.live for prefix in self._chain(other)}
        self.idle += [prefix for prefix in reversed(self._chain(holder)) if prefix not in still_used]
        self.cache.free(holder.sequence)

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.held -= set(self.idle)
        self.idle.clear()

    @rule()
    def publish(self) -> None:
        events = self.cache.take_events()
        assert not set(events.stored) & self.published
        assert set(events.removed) <= self.published
        self.published = (self.published - set(events.removed)) | set(events.stored)
        assert self.published == set(self.cache.held_keys())

    @invariant()
    def both_agree(self) -> None:
        pool = self.cache.pool
        assert set(self.cache.held_keys()) == {block_keys(ROOT, prefix, SIZE)[-1] for prefix in self.held}
        assert (pool.used_blocks, pool.cached_blocks) == (self._used(), len(self.idle))
        assert pool.free_blocks + pool.cached_blocks + pool.used_blocks == BLOCKS

    @invariant()
    def what_is_held_is_prefix_closed(self) -> None:
        assert all(len(prefix) == SIZE or prefix[:-SIZE] in self.held for prefix in self.held)

    @invariant()
    def integrity_holds(self) -> None:
        self.cache.check_integrity([holder.sequence for holder in self.live])


TestCacheAgainstModel = CacheAgainstModel.TestCase
TestCacheAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
