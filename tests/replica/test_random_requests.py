"""Random requests on a pool too small for them, with everything on: shared prefixes, conversations that go on, parts of
blocks, a host tier, preemption, aborts. Every answer is that of an engine without a cache.

`pytest -m long tests/replica/test_random_requests.py` does it with 10,000 requests each.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import pytest

from replica import attention_cascade
from replica.block_moves import carry_out
from replica.model_runner import ModelRunner
from replica.prefix_cache import PrefixCache
from replica.runner import Runner
from replica.scheduler import Scheduler
from replica.sequence import FinishReason, Sequence
from shared.blocks import BlockKey
from tests.replica.pool_runner import PoolRunner, answer_to, make_sequence
from tests.replica.tiny_zoo import SmallEngine, build

VOCABULARY = 199
LONGEST_PROMPT, LONGEST_ANSWER = 48, 20
BLOCK_SIZE, BLOCKS, HOST_BLOCKS = 4, 24, 40

TENANTS = [BlockKey(bytes([number]) * 16) for number in range(2)]


class Request(NamedTuple):
    prompt: list[int]
    max_tokens: int


Oracle = Callable[[list[Request]], list[list[int]]]


class Crowd:
    """Asks at random: behind a few common beginnings, or going on from an answer."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self._beginnings = [self._tokens(self.rng.randint(6, 40)) for _ in range(6)]
        self._ended: list[list[int]] = []

    def ask(self) -> Sequence:
        known = self._ended if self._ended and self.rng.random() < 0.4 else self._beginnings
        prompt = self.rng.choice(known)[: self.rng.randint(10, 40)] + self._tokens(self.rng.randint(1, 12))
        tokens = self.rng.randint(1, LONGEST_ANSWER)
        root = self.rng.choice(TENANTS)
        return make_sequence(prompt[:LONGEST_PROMPT], tokens, root=root, temperature=0.0)

    def hear(self, tokens: list[int]) -> None:
        self._ended = [*self._ended[-20:], tokens]

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]


class Tally(NamedTuple):
    finished: int
    aborted: int
    scheduler: Scheduler


def storm(runner: Runner, requests: int, seed: int, oracle: Oracle) -> Tally:
    cache = PrefixCache(BLOCKS, BLOCK_SIZE, finer=True, host_blocks=HOST_BLOCKS)
    scheduler = Scheduler(cache, token_budget=37, max_running=7, max_waiting=20)
    crowd, rng = Crowd(seed), Random(seed)
    live: dict[str, Sequence] = {}
    unchecked: list[Sequence] = []
    asked = finished = aborted = 0
    while live or asked < requests:
        while asked < requests and len(live) < 15 and rng.random() < 0.6:
            sequence = crowd.ask()
            live[sequence.request_id] = sequence
            scheduler.add(sequence)
            asked += 1
        if live and rng.random() < 0.02:
            scheduler.abort(rng.choice(list(live)))
        if scheduler.has_work:
            chunks = scheduler.schedule()
            carry_out(runner, cache.take_moves())
            scheduler.commit(chunks, runner.execute(chunks))
            scheduler.check_integrity()
        for sequence in [each for each in live.values() if each.finish_reason is not None]:
            del live[sequence.request_id]
            unchecked.append(sequence)
            crowd.hear(sequence.tokens)
            aborted += sequence.finish_reason is FinishReason.ABORT
            finished += sequence.finish_reason is FinishReason.LENGTH
        if len(unchecked) >= 64 or not live:
            compare(unchecked, oracle)
            unchecked.clear()
    assert finished + aborted == requests
    return Tally(finished, aborted, scheduler)


def compare(sequences: list[Sequence], oracle: Oracle) -> None:
    """An aborted one has the beginning of its answer."""
    expected = oracle([Request(each.tokens[: each.prompt_tokens], each.params.max_tokens) for each in sequences])
    for sequence, answer in zip(sequences, expected, strict=True):
        assert sequence.tokens[sequence.prompt_tokens :] == answer[: sequence.output_tokens], sequence.request_id
        assert sequence.finish_reason is FinishReason.ABORT or sequence.output_tokens == len(answer)


def check_that_it_was_hard(tally: Tally) -> None:
    """A cache that is never hit and a pool that is never full would prove nothing."""
    counters = tally.scheduler.counters
    assert counters.hit_tokens > 0.2 * counters.prompt_tokens
    assert min(counters.preemptions, counters.copied_tokens, counters.onloaded_tokens) > tally.finished / 30
    assert sum(tally.scheduler.cache.evictions.values()) > tally.finished
    assert tally.aborted > 0


MANY = pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(7200)])


@pytest.mark.parametrize("requests", [400, MANY])
def test_books_that_are_full_give_the_answers_of_an_engine_without_a_cache(requests: int) -> None:
    runner = PoolRunner(BLOCKS, BLOCK_SIZE, VOCABULARY, HOST_BLOCKS)

    tally = storm(runner, requests, 1, lambda asked: [answer_to(*each, VOCABULARY) for each in asked])

    check_that_it_was_hard(tally)


@pytest.mark.parametrize("requests", [120, MANY])
def test_a_model_whose_pool_is_full_gives_the_answers_of_an_engine_without_a_cache(
    requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In double precision no rounding decides between two tokens, so that answers are equal and not nearly so.
    monkeypatch.setattr(attention_cascade, "_WORTHWHILE_TOKENS", 8)
    monkeypatch.setattr(attention_cascade, "_SHORT_TOKENS", 20)
    uncached = SmallEngine(build("llama").double(), 16 * (LONGEST_PROMPT + LONGEST_ANSWER), 1, token_budget=512)
    roots = iter(range(10**9))

    def answer(asked: list[Request]) -> list[list[int]]:
        return uncached.run(
            *(make_sequence(*each, root=BlockKey(next(roots).to_bytes(16, "big")), temperature=0.0) for each in asked)
        )

    tally = storm(ModelRunner(build("llama").double(), BLOCKS, BLOCK_SIZE, HOST_BLOCKS), requests, 2, answer)

    check_that_it_was_hard(tally)
    assert uncached.scheduler.counters.hit_tokens == 0
