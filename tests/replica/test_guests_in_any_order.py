"""Saving and restoring under everything else that happens to a pool."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replica.guests import NotEnoughRoom
from replica.sequence import Sequence
from tests.replica.guest_pool import SIZE, Pool, kv_of
from tests.replica.pool_runner import ROOT, answer_to, make_sequence

runs = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 2, SIZE, 2 * SIZE])), min_size=1, max_size=4)
prompts = runs.map(lambda drawn: [token for token, length in drawn for _ in range(length)][: 5 * SIZE])
picks = st.integers(0, 1_000)


class Everything(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(num_blocks=10, finer=True, host_blocks=5)
        self.requests: list[Sequence] = []
        self.saving: list[Sequence] = []
        self.restoring: list[tuple[Sequence, int]] = []
        self.files: list[tuple[list[int], bytes]] = []

    @rule(prompt=prompts, max_tokens=st.integers(1, 2 * SIZE))
    def ask(self, prompt: list[int], max_tokens: int) -> None:
        sequence = make_sequence(prompt, max_tokens)
        self.pool.scheduler.add(sequence)
        self.requests.append(sequence)

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.pool.step()
        for sequence in [s for s in self.requests if s.finish_reason is not None]:
            self.requests.remove(sequence)
            prompt = sequence.tokens[: sequence.prompt_tokens]
            assert sequence.tokens[len(prompt) :] == answer_to(prompt, sequence.params.max_tokens)

    @precondition(lambda self: self.requests)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        self.pool.scheduler.abort(self.requests.pop(pick % len(self.requests)).request_id)

    @rule(prompt=prompts)
    def hold(self, prompt: list[int]) -> None:
        guest = self.pool.guests.hold(prompt, ROOT)
        if guest is not None:
            assert guest.tokens == prompt[: len(guest.tokens)]
            self.saving.append(guest)

    @precondition(lambda self: self.saving)
    @rule(pick=picks)
    def save(self, pick: int) -> None:
        guest = self.saving.pop(pick % len(self.saving))
        kv = bytes(self.pool.guests.read(guest, 0, len(guest.block_ids)))
        assert kv == kv_of(guest.tokens)
        self.files.append((list(guest.tokens), kv))
        self.pool.guests.leave(guest)

    @precondition(lambda self: self.files)
    @rule(pick=picks)
    def expect(self, pick: int) -> None:
        number = pick % len(self.files)
        idle, used = self.pool.cache.pool.idle_blocks, self.pool.cache.pool.used_blocks
        try:
            self.restoring.append((self.pool.guests.expect(self.files[number][0], ROOT), number))
        except NotEnoughRoom:
            assert (idle, used) == (self.pool.cache.pool.idle_blocks, self.pool.cache.pool.used_blocks)

    @precondition(lambda self: self.restoring)
    @rule(pick=picks, well=st.booleans())
    def end_restore(self, pick: int, well: bool) -> None:
        guest, number = self.restoring.pop(pick % len(self.restoring))
        if well:
            self.pool.write(guest, self.files[number][1])
            assert self.pool.guests.settle(guest) == len(guest.tokens) // SIZE
        else:
            self.pool.guests.leave(guest)

    @rule()
    def reset(self) -> None:
        self.pool.cache.reset()

    @invariant()
    def books_agree(self) -> None:
        self.pool.scheduler.check_integrity()

    def teardown(self) -> None:
        for guest in [*self.saving, *(guest for guest, _ in self.restoring)]:
            self.pool.guests.leave(guest)
        while self.pool.scheduler.has_work:
            self.pool.step()
            assert not self.pool.stalled
        pool = self.pool.cache.pool
        assert pool.used_blocks == 0


TestEverything = Everything.TestCase
TestEverything.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
