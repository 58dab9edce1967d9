"""The scheduler between tenants, and what it refuses when its turn comes."""

from __future__ import annotations

from collections import Counter

import pytest

from replica.prefix_cache import PrefixCache
from replica.scheduler import Scheduler
from replica.sequence import FinishReason, Sequence
from tests.replica.pool_runner import PoolRunner, answer_to, make_sequence

BLOCK_SIZE = 16


class Bench:
    """Scheduler, cache and runner, stepped by hand; the books are checked after every step."""

    def __init__(self, num_blocks: int = 200, token_budget: int = 64, max_running: int = 4) -> None:
        self.cache = PrefixCache(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(self.cache, token_budget, max_running, max_waiting=500)
        self.runner = PoolRunner(num_blocks, BLOCK_SIZE)
        self.computed = Counter[str]()

    def step(self) -> list[Sequence]:
        """Those that were refused."""
        chunks = self.scheduler.schedule()
        for chunk in chunks:
            self.computed[chunk.sequence.tenant] += chunk.end - chunk.start
        self.scheduler.commit(chunks, self.runner.execute(chunks))
        self.scheduler.check_integrity()
        return self.scheduler.take_refused()

    def run(self, *sequences: Sequence) -> list[Sequence]:
        for sequence in sequences:
            self.scheduler.add(sequence)
        refused = []
        while self.scheduler.has_work:
            refused += self.step()
        return refused


def of_tenant(tenant: str, prompt: list[int], max_tokens: int = 4) -> Sequence:
    sequence = make_sequence(prompt, max_tokens)
    sequence.tenant = tenant
    return sequence


def expecting(tokens: int, prompt: list[int]) -> Sequence:
    sequence = make_sequence(prompt)
    sequence.expected_cached_tokens = tokens
    return sequence


def test_a_flood_of_one_tenant_leaves_the_other_half_of_the_engine() -> None:
    bench = Bench()
    for number in range(60):
        bench.scheduler.add(of_tenant("flood", [number] * 40, max_tokens=8))
    for _ in range(10):
        bench.step()
    for number in range(20):
        bench.scheduler.add(of_tenant("other", [100 + number] * 40, max_tokens=8))
    bench.computed.clear()
    for _ in range(20):
        bench.step()
    assert bench.computed["other"] == pytest.approx(bench.computed["flood"], rel=0.3)


def test_short_requests_do_not_starve_behind_long_ones_of_another_tenant_and_all_answers_are_right() -> None:
    bench = Bench(max_running=2)
    long = [of_tenant("long", [number, *range(200)], max_tokens=3) for number in range(10)]
    short = [of_tenant("short", [50 + number] * 5, max_tokens=3) for number in range(10)]
    for sequence in (*long, *short):
        bench.scheduler.add(sequence)
    while any(sequence.finish_reason is None for sequence in short):
        bench.step()
    assert sum(sequence.finish_reason is None for sequence in long) >= 7
    bench.run()
    for sequence in (*long, *short):
        prompt = sequence.tokens[: sequence.prompt_tokens]
        assert sequence.tokens[sequence.prompt_tokens :] == answer_to(prompt, 3)


def test_what_expects_much_more_than_the_cache_holds_is_refused_without_computing_anything() -> None:
    bench = Bench()
    prompt = list(range(1000))
    cold = expecting(992, prompt)
    assert bench.run(cold) == [cold]
    assert cold.finish_reason is FinishReason.COLD
    assert cold.cached_tokens == 0
    assert bench.runner.steps == [[]]
    assert bench.cache.held_blocks == 0

    bench.run(make_sequence(prompt[:400]))
    held = expecting(992, prompt)
    assert bench.run(held) == [held]
    assert held.cached_tokens == 400


@pytest.mark.parametrize(
    ("held", "expected", "refused"),
    [
        (0, 511, False),  # not worth another journey
        (0, 512, True),
        (480, 960, False),  # half of it is there
        (464, 992, True),
        (464, 975, False),
        (800, 800, False),
    ],
)
def test_little_is_not_refused_nor_what_is_mostly_there(held: int, expected: int, refused: bool) -> None:
    bench = Bench()
    prompt = list(range(1100))
    if held:
        bench.run(make_sequence(prompt[:held]))
    sequence = expecting(expected, prompt)
    assert bool(bench.run(sequence)) is refused


def test_what_somebody_is_computing_counts_as_held_once_it_is_there() -> None:
    bench = Bench(token_budget=100)
    prompt = list(range(1000))
    first, second = make_sequence(prompt), expecting(992, [*prompt, 7])
    assert bench.run(first, second) == []
    assert second.cached_tokens == 992


def test_a_preempted_sequence_is_not_refused_for_what_it_lost() -> None:
    bench = Bench(num_blocks=64, max_running=4)
    prompt = list(range(600))
    bench.run(make_sequence(prompt))
    sequence = expecting(600, [*prompt, *range(100)])
    bench.scheduler.add(sequence)
    bench.step()
    bench.scheduler._preempt(sequence)
    bench.cache.reset()
    assert bench.run() == []
    assert sequence.finish_reason is FinishReason.LENGTH
