from __future__ import annotations

from replica.prefix_cache import PrefixCache
from tests.replica.pool_runner import make_sequence

SIZE = 4


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def remember(cache: PrefixCache, first: int, blocks: int, keep_seconds: float = 0.0, answer_blocks: int = 0) -> None:
    prompt = list(range(first, first + blocks * SIZE))
    sequence = make_sequence(prompt)
    sequence.keep_seconds = keep_seconds
    assert cache.allocate(sequence, cache.match(sequence))
    sequence.tokens += list(range(first + 500, first + 500 + answer_blocks * SIZE))
    assert cache.grow(sequence)
    sequence.computed_tokens = len(sequence.tokens)
    cache.register(sequence)
    cache.free(sequence)
    cache.check_integrity([])


def held(cache: PrefixCache, first: int, blocks: int) -> int:
    return len(cache.match(make_sequence([*range(first, first + blocks * SIZE), 0])).block_ids)


def fill(cache: PrefixCache, times: int = 20) -> None:
    for n in range(times):
        remember(cache, 10_000 + 100 * n, 2)


def test_what_was_asked_to_be_kept_outlives_younger_blocks_until_its_time_is_over() -> None:
    clock = Clock()
    cache = PrefixCache(16, SIZE, retained_share=0.5, clock=clock)
    remember(cache, 0, 4, keep_seconds=60)
    fill(cache)
    assert held(cache, 0, 4) == 4
    clock.now += 60
    fill(cache)
    assert held(cache, 0, 4) == 0


def test_a_wish_is_for_the_prompt_and_not_for_the_answer() -> None:
    cache = PrefixCache(16, SIZE, retained_share=1.0, clock=Clock())
    remember(cache, 0, 4, keep_seconds=60, answer_blocks=2)
    assert len(cache.retention) == 4


def test_wishes_beyond_the_share_are_cached_like_everything_else_from_their_end_on() -> None:
    cache = PrefixCache(16, SIZE, retained_share=0.25, clock=Clock())
    remember(cache, 0, 6, keep_seconds=60)
    fill(cache)
    assert held(cache, 0, 6) == 4


def test_kept_blocks_go_when_nothing_else_is_left() -> None:
    cache = PrefixCache(8, SIZE, retained_share=1.0, clock=Clock())
    remember(cache, 0, 6, keep_seconds=60)
    remember(cache, 1_000, 8)
    assert held(cache, 0, 6) == 0
    assert len(cache.retention) == 0


def test_asking_again_prolongs_and_never_shortens() -> None:
    clock = Clock()
    cache = PrefixCache(16, SIZE, retained_share=0.5, clock=clock)
    remember(cache, 0, 4, keep_seconds=60)
    clock.now += 50
    remember(cache, 0, 4, keep_seconds=5)
    remember(cache, 0, 4, keep_seconds=60)
    clock.now += 55
    fill(cache)
    assert held(cache, 0, 4) == 4


def test_a_reset_forgets_wishes_too() -> None:
    cache = PrefixCache(16, SIZE, clock=Clock())
    remember(cache, 0, 4, keep_seconds=60)
    cache.reset()
    assert len(cache.retention) == 0
    assert cache.held_blocks == 0
