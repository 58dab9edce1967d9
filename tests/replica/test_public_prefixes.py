"""Tenants behind a public prefix: in the cache they meet in exactly its blocks, whatever the cache can do besides."""

from __future__ import annotations

import random

import pytest

from replica.block_moves import carry_out
from replica.prefix_cache import PrefixCache
from replica.scheduler import Scheduler
from replica.sequence import Sequence
from shared.blocks import BlockKey, block_keys
from shared.public_prefixes import PublicPrefixes
from tests.replica.pool_runner import PoolRunner, answer_to, make_sequence

SIZE = 8
MANUAL = list(range(100, 130))  # three whole blocks and some
PUBLIC_BLOCKS = 3
PUBLIC = PublicPrefixes("model", SIZE, "secret", [MANUAL])


def of_tenant(tenant: str, prompt: list[int], max_tokens: int = 4) -> Sequence:
    namespace = PUBLIC.namespace(tenant, prompt)
    sequence = make_sequence(prompt, max_tokens, root=namespace.root)
    sequence.tenant, sequence.branch = tenant, namespace.branch
    return sequence


class Bench:
    def __init__(self, cache: PrefixCache, max_running: int = 4) -> None:
        self.cache = cache
        self.scheduler = Scheduler(cache, token_budget=32, max_running=max_running, max_waiting=500)
        self.runner = PoolRunner(cache.num_blocks, cache.block_size, host_blocks=cache.host_blocks)

    def run(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)
        while self.scheduler.has_work:
            self.step()

    def step(self) -> None:
        chunks = self.scheduler.schedule()
        carry_out(self.runner, self.cache.take_moves())
        self.scheduler.commit(chunks, self.runner.execute(chunks))
        self.scheduler.check_integrity()


@pytest.mark.parametrize("finer", [False, True])
def test_the_same_prompt_of_two_tenants_shares_exactly_the_public_blocks(finer: bool) -> None:
    bench = Bench(PrefixCache(100, SIZE, finer=finer))
    prompt = [*MANUAL, *range(40)]
    held = {}
    for tenant in ("a", "b"):
        before = set(bench.cache.held_keys())
        sequence = of_tenant(tenant, prompt)
        bench.run(sequence)
        assert sequence.tokens[len(prompt) :] == answer_to(prompt, 4)
        assert sequence.cached_tokens == (0 if tenant == "a" else PUBLIC_BLOCKS * SIZE)
        held[tenant] = set(bench.cache.held_keys()) - before
    public = set(block_keys(PUBLIC.namespace("", []).root, MANUAL, SIZE))
    assert len(public) == PUBLIC_BLOCKS
    assert public <= held["a"]
    assert not held["a"] & held["b"]
    assert len(held["b"]) == len(held["a"]) - PUBLIC_BLOCKS

    again = of_tenant("b", prompt)
    bench.run(again)
    assert again.cached_tokens >= (len(prompt) - 1) // SIZE * SIZE


def test_even_if_their_keys_were_equal_tenants_would_not_meet_behind_the_prefix() -> None:
    def blind(parent: BlockKey, tokens: list[int], size: int) -> list[BlockKey]:
        """Keys that say nothing of what they continue."""
        blocks = [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)]
        return [BlockKey(bytes([block[0], block[-1]]) * 8) for block in blocks]

    bench = Bench(PrefixCache(100, SIZE, blind))
    prompt = [*MANUAL, *range(200, 240)]
    bench.run(of_tenant("a", prompt))
    assert all(key in bench.cache.held_keys() for key in blind(BlockKey(b""), prompt, SIZE))
    stranger = of_tenant("b", prompt)
    bench.run(stranger)
    assert stranger.cached_tokens == PUBLIC_BLOCKS * SIZE


def test_a_prompt_that_is_all_public_goes_on_alone_with_its_answer() -> None:
    bench = Bench(PrefixCache(100, SIZE))
    prompt = MANUAL[:24]
    first, second = of_tenant("a", prompt, max_tokens=20), of_tenant("b", prompt, max_tokens=20)
    bench.run(first)
    bench.run(second)
    assert second.cached_tokens == 16  # the last token is always computed
    follow_up = of_tenant("b", [*second.tokens, 5])
    bench.run(follow_up)
    assert follow_up.cached_tokens == 40


def test_many_cold_tenants_at_once_compute_the_public_prefix_once() -> None:
    bench = Bench(PrefixCache(200, SIZE), max_running=32)
    bench.run(*[of_tenant(f"t{number}", [*MANUAL[:24], number], max_tokens=1) for number in range(20)])
    assert bench.scheduler.counters.computed_tokens == 24 + 20


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("finer", "host_blocks"), [(False, 0), (True, 12)])
def test_tenants_in_a_pool_too_small_get_right_answers_and_only_what_they_warmed_themselves(
    seed: int, finer: bool, host_blocks: int
) -> None:
    chance = random.Random(seed)
    bench = Bench(PrefixCache(24, SIZE, finer=finer, host_blocks=host_blocks))
    warmed: dict[str, set[tuple[int, ...]]] = {tenant: set() for tenant in ("a", "b", "c", "")}
    hits = 0
    for _ in range(200):
        tenant = chance.choice(list(warmed))
        beginning = chance.choice([MANUAL, MANUAL[: chance.randrange(30)], []])
        prompt = beginning + [chance.randrange(2)] * chance.randrange(1, 40)
        sequence = of_tenant(tenant, prompt, max_tokens=chance.randrange(1, 6))
        bench.run(sequence)
        assert sequence.tokens[len(prompt) :] == answer_to(prompt, sequence.params.max_tokens)
        public_tokens = 0 if sequence.branch is None else sequence.branch.blocks * SIZE
        if tenant and sequence.cached_tokens > public_tokens:
            assert tuple(prompt[: sequence.cached_tokens]) in warmed[tenant]
            hits += 1
        warmed[tenant].update(tuple(sequence.tokens[:end]) for end in range(1, len(sequence.tokens) + 1))
    assert hits > 10
