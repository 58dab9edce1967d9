from __future__ import annotations

import random

import pytest

from replica.block_moves import carry_out
from replica.prefix_cache import PrefixCache
from replica.scheduler import EngineFull, InvalidPrompt, PromptTooLong, Scheduler
from replica.sequence import FinishReason, Sequence, SequenceStatus
from shared.blocks import BlockKey
from tests.replica.pool_runner import PoolRunner, answer_to, make_sequence

SIZE = 4


class Bench:
    """A scheduler with a runner, stepped by hand, checked after every step."""

    def __init__(
        self,
        num_blocks: int = 64,
        budget: int = 32,
        max_running: int = 8,
        max_waiting: int = 1_000,
        context_tokens: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        vocab: int = 50,
        block_size: int = SIZE,
        finer: bool = False,
        host_blocks: int = 0,
    ) -> None:
        self.runner = PoolRunner(num_blocks, block_size, vocab, host_blocks)
        self.scheduler = Scheduler(
            PrefixCache(num_blocks, block_size, finer=finer, host_blocks=host_blocks),
            budget,
            max_running,
            max_waiting,
            context_tokens=context_tokens,
            eos_token_ids=eos_token_ids,
        )

    def add(self, prompt: list[int], max_tokens: int = 4, **params: object) -> Sequence:
        sequence = make_sequence(prompt, max_tokens, **params)  # type: ignore[arg-type]
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[str, int, int]]:
        chunks = self.scheduler.schedule()
        assert chunks, "nothing to do although there is work"
        assert sum(chunk.end - chunk.start for chunk in chunks) <= self.scheduler.token_budget
        carry_out(self.runner, self.scheduler.cache.take_moves())
        self.scheduler.commit(chunks, self.runner.execute(chunks))
        self.scheduler.check_integrity()
        return self.runner.steps[-1]

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()
        pool = self.scheduler.cache.pool
        assert pool.used_blocks == 0
        assert not self.scheduler.cache._claims
        assert self.scheduler.queued_prefill_tokens == 0


def answer(sequence: Sequence) -> list[int]:
    return sequence.tokens[sequence.prompt_tokens :]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget_and_answered() -> None:
    bench = Bench(budget=10)
    sequence = bench.add(list(range(25)))
    assert [bench.step() for _ in range(3)] == [
        [(sequence.request_id, 0, 10)],
        [(sequence.request_id, 10, 20)],
        [(sequence.request_id, 20, 25)],
    ]
    bench.run()
    assert answer(sequence) == answer_to(list(range(25)), 4)
    assert sequence.finish_reason is FinishReason.LENGTH


def test_decodes_go_before_prefills_in_one_mixed_step() -> None:
    bench = Bench(budget=8)
    first = bench.add([1, 2, 3], max_tokens=9)
    second = bench.add(list(range(20)))
    bench.step()
    assert bench.step() == [(first.request_id, 3, 4), (second.request_id, 5, 12)]


def test_waiting_sequences_are_admitted_in_order_and_a_big_one_holds_back_those_behind_it() -> None:
    bench = Bench(num_blocks=8)
    running = bench.add(list(range(16)), max_tokens=8)
    bench.step()
    big, small = bench.add(list(range(100, 124))), bench.add([7])
    bench.step()
    assert (big.status, small.status) == (SequenceStatus.WAITING, SequenceStatus.WAITING)
    bench.run()
    order = [step[0][0] for step in bench.runner.steps]
    assert order.index(running.request_id) < order.index(big.request_id)
    assert [answer(s) for s in (running, big, small)] == [
        answer_to(list(range(16)), 8),
        answer_to(list(range(100, 124)), 4),
        answer_to([7], 4),
    ]


def test_a_second_turn_computes_only_what_is_new_including_after_the_answer() -> None:
    bench = Bench()
    first = bench.add(list(range(16)), max_tokens=5)
    bench.run()
    second = bench.add([*first.tokens, 60, 61])
    assert bench.step() == [(second.request_id, 20, 23)]
    assert second.cached_tokens == 20
    bench.run()
    assert answer(second) == answer_to([*first.tokens, 60, 61], 4)


@pytest.mark.parametrize("same", [5, 20])
def test_equal_cold_prompts_at_once_are_prefilled_once(same: int) -> None:
    bench = Bench(budget=16, max_running=32)
    prompt = list(range(41))
    sequences = [bench.add(prompt, max_tokens=1) for _ in range(same)]
    other = bench.add([70, 71], max_tokens=1)
    bench.run()
    assert bench.scheduler.counters.computed_tokens == 41 + (same - 1) * 1 + 2
    assert [s.cached_tokens for s in sequences] == [0] + [40] * (same - 1)
    assert all(answer(s) == answer_to(prompt, 1) for s in sequences)
    # Who waits for a block holds nobody back.
    first_step_of_other = next(i for i, step in enumerate(bench.runner.steps) if step[-1][0] == other.request_id)
    assert first_step_of_other == 2


def test_prompts_that_share_only_a_beginning_wait_for_that_beginning_alone() -> None:
    bench = Bench(budget=64)
    shared = list(range(16))
    first = bench.add(shared + list(range(100, 132)))
    second = bench.add([*shared, 50, 51])
    assert bench.step() == [(first.request_id, 0, 48)]
    assert second.awaited_key == first.keys[3]
    assert bench.step() == [(first.request_id, 48, 49), (second.request_id, 16, 18)]
    bench.run()
    assert second.cached_tokens == 16
    assert bench.scheduler.counters.computed_tokens == 48 + 2 + 3 + 3


@pytest.mark.parametrize("steps_before", [1, 2])
def test_when_the_one_that_computes_for_others_is_aborted_the_next_takes_over(steps_before: int) -> None:
    bench = Bench(budget=16)
    prompt = list(range(60))
    first, second, third = (bench.add(prompt) for _ in range(3))
    for _ in range(steps_before):
        bench.step()
    assert bench.scheduler.abort(first.request_id) is first
    bench.run()
    assert second.cached_tokens == 16 * steps_before
    assert third.cached_tokens == 56
    assert answer(second) == answer(third) == answer_to(prompt, 4)


def test_when_the_one_that_computes_for_others_is_preempted_nobody_is_stuck() -> None:
    bench = Bench(num_blocks=13, budget=4)
    old = bench.add([1, 2, 3, 4], max_tokens=45)
    while old.output_tokens < 14:
        bench.step()
    prompt = list(range(100, 126))
    first, second = bench.add(prompt), bench.add(prompt)
    bench.step()
    assert first.status is SequenceStatus.RUNNING
    bench.run()
    assert first.preemptions > 0
    assert first.cached_tokens == 0
    assert answer(old) == answer_to([1, 2, 3, 4], 45)
    assert answer(first) == answer(second) == answer_to(prompt, 4)


def test_preemption_takes_the_last_admitted_and_changes_no_answer() -> None:
    bench = Bench(num_blocks=8, budget=16)
    prompts = [[n, n + 1, n + 2] for n in (0, 10, 20)]
    sequences = [bench.add(prompt, max_tokens=20) for prompt in prompts]
    bench.run()
    assert sequences[0].preemptions == 0
    assert sequences[-1].preemptions > 0
    assert bench.scheduler.counters.preemptions == sum(s.preemptions for s in sequences)
    assert [answer(s) for s in sequences] == [answer_to(prompt, 20) for prompt in prompts]
    # A recompute finds its own blocks, but what it reports as cached stays what it was at first.
    assert [s.cached_tokens for s in sequences] == [0, 0, 0]
    assert bench.scheduler.counters.queries == 3


def test_the_preempted_is_admitted_again_before_those_that_never_ran() -> None:
    bench = Bench(num_blocks=6, max_running=2)
    first = bench.add([1, 2, 3], max_tokens=18)
    second = bench.add([4, 5, 6], max_tokens=18)
    third = bench.add([7], max_tokens=2)
    while third.status is SequenceStatus.WAITING:
        bench.step()
    assert second.preemptions > 0
    assert second.status is not SequenceStatus.WAITING
    bench.run()
    assert [answer(first), answer(second)] == [answer_to([1, 2, 3], 18), answer_to([4, 5, 6], 18)]


def test_admission_leaves_room_for_the_next_decodes_of_those_that_run() -> None:
    bench = Bench(num_blocks=4)
    bench.add(list(range(7)), max_tokens=5)
    bench.step()
    second = bench.add(list(range(50, 58)), max_tokens=2)
    bench.step()
    assert second.status is SequenceStatus.WAITING
    bench.run()
    assert bench.scheduler.counters.preemptions == 0


def test_no_more_run_than_the_budget_has_tokens() -> None:
    bench = Bench(budget=2, max_running=8)
    for n in range(8):
        bench.add([n], max_tokens=3)
    while bench.scheduler.has_work:
        bench.step()
        assert bench.scheduler.running <= 2


def test_a_pool_of_one_block_serves_what_fits_into_it_one_by_one() -> None:
    bench = Bench(num_blocks=1)
    sequences = [bench.add([n], max_tokens=4) for n in range(5)]
    whole = bench.add([1, 2, 3, 4], max_tokens=1)
    bench.run()
    assert [answer(s) for s in sequences] == [answer_to([n], 4) for n in range(5)]
    assert answer(whole) == answer_to([1, 2, 3, 4], 1)
    with pytest.raises(PromptTooLong):
        bench.add([1, 2, 3, 4], max_tokens=2)


def test_a_prompt_of_exactly_one_block_is_answered_alike_cold_and_warm() -> None:
    bench = Bench()
    cold, warm = bench.add([1, 2, 3, 4]), bench.add([1, 2, 3, 4])
    bench.run()
    assert answer(cold) == answer(warm) == answer_to([1, 2, 3, 4], 4)
    assert warm.cached_tokens == 0


@pytest.mark.parametrize(
    ("context_tokens", "limit"), [(30, "the context is 30 tokens"), (None, "this replica's KV pool holds 32 tokens")]
)
def test_what_can_never_fit_is_refused_at_once_with_both_numbers(context_tokens: int | None, limit: str) -> None:
    bench = Bench(num_blocks=8, context_tokens=context_tokens)
    with pytest.raises(PromptTooLong, match=f"prompt has 20 tokens and the answer may have 15, 35 together, .*{limit}"):
        bench.add(list(range(20)), max_tokens=15)
    assert not bench.scheduler.has_work
    bench.add(list(range(20)), max_tokens=10)
    bench.run()


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidPrompt, match="at least one token"):
        Bench().add([])


def test_more_than_may_run_and_wait_are_refused() -> None:
    bench = Bench(max_running=2, max_waiting=1)
    for n in range(3):
        bench.add([n])
    with pytest.raises(EngineFull, match="3 requests"):
        bench.add([9])
    bench.run()
    bench.add([9])


def test_an_id_that_is_already_here_is_refused() -> None:
    bench = Bench()
    sequence = bench.add([1])
    with pytest.raises(ValueError, match="already here"):
        bench.scheduler.add(sequence)


def test_no_answer_wanted_computes_the_prompt_for_the_cache_alone() -> None:
    bench = Bench()
    sequence = bench.add(list(range(8)), max_tokens=0)
    bench.run()
    assert (answer(sequence), sequence.finish_reason) == ([], FinishReason.LENGTH)
    assert bench.scheduler.cache.held_blocks == 2


@pytest.mark.parametrize("where", ["stop_token_ids", "eos"])
def test_a_stop_token_ends_the_answer_and_is_its_last_token(where: str) -> None:
    expected = answer_to([1, 2, 3], 10)
    stop = expected[3]
    cut = expected[: expected.index(stop) + 1]
    bench = Bench(eos_token_ids=(stop,) if where == "eos" else ())
    params = {"stop_token_ids": frozenset({stop})} if where == "stop_token_ids" else {}
    sequence = bench.add([1, 2, 3], 10, **params)
    deaf = bench.add([1, 2, 3], 10, ignore_eos=True)
    bench.run()
    assert (answer(sequence), sequence.finish_reason) == (cut, FinishReason.STOP)
    assert (answer(deaf), deaf.finish_reason) == (expected, FinishReason.LENGTH)


def test_aborting_a_waiting_and_a_running_sequence_frees_all_and_unknown_ids_are_fine() -> None:
    bench = Bench(max_running=1)
    running, waiting = bench.add(list(range(9))), bench.add([50])
    bench.step()
    for sequence in (waiting, running):
        assert bench.scheduler.abort(sequence.request_id) is sequence
        assert sequence.finish_reason is FinishReason.ABORT
        bench.scheduler.check_integrity()
    assert bench.scheduler.abort(running.request_id) is None
    assert not bench.scheduler.has_work
    assert bench.scheduler.cache.pool.used_blocks == 0


def test_queued_prefill_tokens_count_what_waits_and_what_is_half_computed() -> None:
    bench = Bench(budget=10, max_running=1)
    bench.add(list(range(25)))
    bench.add([1, 2, 3])
    assert bench.scheduler.queued_prefill_tokens == 28
    bench.step()
    assert bench.scheduler.queued_prefill_tokens == 15 + 3
    bench.run()


def _random_prompt(rng: random.Random, block_size: int, longest: int) -> list[int]:
    """Few beginnings, few tokens: prefixes meet again and again, at every depth."""
    beginning = [rng.randrange(3)] * (rng.randrange(4) * block_size + rng.randrange(2))
    return (beginning + [rng.randrange(3) for _ in range(rng.randint(1, 10))])[:longest]


@pytest.mark.parametrize(
    ("finer", "host_blocks"), [(False, 0), (True, 0), (False, 7), (True, 5)], ids=["plain", "finer", "host", "both"]
)
@pytest.mark.parametrize("seed", range(6))
def test_random_requests_on_a_pool_too_small_answer_as_an_engine_without_cache_would(
    seed: int, finer: bool, host_blocks: int
) -> None:
    rng = random.Random(seed)
    num_blocks, block_size = rng.choice([(6, 4), (9, 4), (24, 1), (3, 16), (12, 3)])
    bench = Bench(
        num_blocks,
        rng.choice((1, 3, 8, 64)),
        rng.choice((1, 4, 16)),
        vocab=3,
        block_size=block_size,
        finer=finer,
        host_blocks=host_blocks,
    )
    roots = [BlockKey(bytes([n]) * 16) for n in range(2)]
    wanted: dict[str, tuple[Sequence, list[int]]] = {}
    aborted = 0
    published: set[BlockKey] = set()
    on_host: set[BlockKey] = set()
    for _ in range(300):
        max_tokens = rng.randint(0, 6)
        prompt = _random_prompt(rng, block_size, num_blocks * block_size - 5)
        sequence = make_sequence(prompt, max_tokens, root=rng.choice(roots))
        bench.scheduler.add(sequence)
        wanted[sequence.request_id] = (sequence, answer_to(prompt, max_tokens, vocab=3))
        for _ in range(rng.randrange(4)):
            if bench.scheduler.has_work:
                bench.step()
        if rng.random() < 0.1:
            aborted += bench.scheduler.abort(rng.choice(list(wanted))) is not None
            bench.scheduler.check_integrity()
        if rng.random() < 0.02:
            bench.scheduler.cache.reset()
        events = bench.scheduler.cache.take_events()
        published = (published - set(events.removed)) | set(events.stored)
        on_host = (on_host - set(events.host_removed)) | set(events.host_stored)
        assert published == set(bench.scheduler.cache.held_keys())
        assert on_host == {key for key, _ in bench.scheduler.cache.host.items()}
    bench.run()
    for sequence, expected in wanted.values():
        if sequence.finish_reason is FinishReason.ABORT:
            assert answer(sequence) == expected[: sequence.output_tokens]
            aborted -= 1
        else:
            assert answer(sequence) == expected
    assert aborted == 0
    counters = bench.scheduler.counters
    assert counters.hit_tokens > 0
    assert (counters.copied_tokens > 0) is (finer and block_size > 1)
    assert (counters.onloaded_tokens > 0) is bool(host_blocks)
