from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from replica.block_pool import IntegrityError
from replica.prefix_cache import CacheEvents, PrefixCache
from replica.runner import Chunk
from replica.sequence import Sequence
from shared.blocks import BlockKey, block_keys
from tests.replica.pool_runner import PoolRunner, answer_to, make_sequence

SIZE = 4


def prompt_of(blocks: int, first: int = 0) -> list[int]:
    return list(range(first, first + blocks * SIZE))


def admit(cache: PrefixCache, prompt: list[int], root: BlockKey | None = None) -> Sequence:
    sequence = make_sequence(prompt) if root is None else make_sequence(prompt, root=root)
    assert cache.allocate(sequence, cache.match(sequence))
    return sequence


def compute(cache: PrefixCache, sequence: Sequence) -> None:
    sequence.computed_tokens = len(sequence.tokens)
    cache.register(sequence)


def remember(cache: PrefixCache, prompt: list[int]) -> None:
    sequence = admit(cache, prompt)
    compute(cache, sequence)
    cache.free(sequence)


def hit_blocks(cache: PrefixCache, prompt: list[int]) -> int:
    return len(cache.match(make_sequence(prompt)).block_ids)


def test_a_cached_prefix_is_shared_by_reference_and_not_copied() -> None:
    cache = PrefixCache(16, SIZE)
    first = admit(cache, [*prompt_of(3), 90])
    compute(cache, first)
    second = admit(cache, [*prompt_of(3), 91])
    assert second.block_ids[:3] == first.block_ids[:3]
    assert second.block_ids[3] != first.block_ids[3]
    assert second.computed_tokens == 3 * SIZE
    assert cache.pool.used_blocks == 5
    cache.check_integrity([first, second])


def test_a_hit_ends_where_the_content_differs_and_never_resumes_behind_it() -> None:
    cache = PrefixCache(16, SIZE)
    a, x, b, c = prompt_of(1), prompt_of(1, 50), prompt_of(1, 10), prompt_of(1, 20)
    remember(cache, a + x + c)
    assert hit_blocks(cache, a + b + c + [0]) == 1


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_a_prompt_of_exactly_k_blocks_hits_k_minus_one(blocks: int) -> None:
    cache = PrefixCache(16, SIZE)
    remember(cache, prompt_of(blocks))
    assert hit_blocks(cache, prompt_of(blocks)) == blocks - 1
    assert hit_blocks(cache, [*prompt_of(blocks), 99]) == blocks


def test_only_full_blocks_are_cached() -> None:
    cache = PrefixCache(16, SIZE)
    remember(cache, prompt_of(1)[:-1])
    assert cache.held_blocks == 0
    remember(cache, [*prompt_of(2), 7])
    assert cache.held_blocks == 2


def test_blocks_of_the_answer_are_cached_as_they_fill() -> None:
    cache = PrefixCache(16, SIZE)
    sequence = admit(cache, prompt_of(1))
    compute(cache, sequence)
    for token in (30, 31, 32, 33):
        sequence.tokens.append(token)
        assert cache.grow(sequence)
        compute(cache, sequence)
    cache.free(sequence)
    assert hit_blocks(cache, [*prompt_of(1), 30, 31, 32, 33, 1]) == 2


def test_tenants_with_different_roots_never_share() -> None:
    cache = PrefixCache(16, SIZE)
    mine = admit(cache, prompt_of(2), BlockKey(b"m" * 16))
    compute(cache, mine)
    theirs = admit(cache, prompt_of(2), BlockKey(b"t" * 16))
    assert theirs.computed_tokens == 0
    assert not set(mine.block_ids) & set(theirs.block_ids)


def test_content_computed_twice_at_once_ends_up_in_one_block_and_the_copy_is_given_away_first() -> None:
    cache = PrefixCache(16, SIZE)
    first, second = admit(cache, prompt_of(2)), admit(cache, prompt_of(2))
    copies = list(second.block_ids)
    assert not set(first.block_ids) & set(copies)
    compute(cache, first)
    compute(cache, second)
    assert second.block_ids == first.block_ids
    assert set(cache.pool.queue()[:2]) == set(copies)
    assert cache.take_events().stored == first.keys
    # The second goes on from the shared blocks, so what it adds can be found too.
    second.tokens += prompt_of(1, 40)
    cache.grow(second)
    compute(cache, second)
    cache.free(first)
    cache.free(second)
    assert hit_blocks(cache, prompt_of(2) + prompt_of(1, 40) + [0]) == 3
    cache.check_integrity([])


def test_the_shared_prefix_survives_while_tails_are_evicted() -> None:
    cache = PrefixCache(8, SIZE)
    system = prompt_of(4)
    for user in range(20):
        remember(cache, system + prompt_of(2, 100 + 10 * user))
        cache.check_integrity([])
        assert hit_blocks(cache, [*system, 0]) == 4
    assert cache.evictions == {"capacity": 20 * 2 - 4}


def test_blocks_in_use_are_never_evicted() -> None:
    cache = PrefixCache(4, SIZE)
    sequence = admit(cache, prompt_of(3))
    compute(cache, sequence)
    other = make_sequence(prompt_of(2, 50))
    assert not cache.allocate(other, cache.match(other))
    assert other.block_ids == []
    assert cache.held_keys() == sequence.keys
    cache.check_integrity([sequence])


def test_a_match_is_not_evicted_by_its_own_allocation() -> None:
    cache = PrefixCache(4, SIZE)
    remember(cache, prompt_of(3))
    sequence = make_sequence([*prompt_of(3), 99])
    match = cache.match(sequence)
    assert cache.allocate(sequence, match)
    assert sequence.block_ids[:3] == match.block_ids
    assert not cache.grow(make_grown(sequence, 2))
    cache.check_integrity([sequence])


def make_grown(sequence: Sequence, blocks: int) -> Sequence:
    sequence.tokens += prompt_of(blocks)
    return sequence


def test_allocation_leaves_the_spare_blocks_it_is_asked_to_leave() -> None:
    cache = PrefixCache(4, SIZE)
    sequence = make_sequence(prompt_of(3))
    assert not cache.allocate(sequence, cache.match(sequence), spare_blocks=2)
    assert cache.allocate(sequence, cache.match(sequence), spare_blocks=1)


def test_events_are_net_and_keep_the_published_set_prefix_closed() -> None:
    cache = PrefixCache(3, SIZE)
    remember(cache, prompt_of(3))
    stored = cache.take_events().stored
    assert stored == block_keys(make_sequence([0]).root, prompt_of(3), SIZE)
    # The tail goes and comes back, what pushed it out comes and goes: nothing to tell.
    remember(cache, prompt_of(1, 70))
    remember(cache, prompt_of(3))
    assert not cache.take_events()
    remember(cache, prompt_of(3, 200))
    events = cache.take_events()
    assert events.removed == stored[::-1]
    assert events.stored == cache.held_keys()


def test_a_reset_forgets_all_but_what_is_in_use() -> None:
    cache = PrefixCache(16, SIZE)
    remember(cache, prompt_of(2) + prompt_of(2, 60))
    sequence = admit(cache, [*prompt_of(2), 1])
    stored = cache.take_events().stored
    assert cache.reset() == (2, 2)
    assert cache.take_events().removed == [stored[3], stored[2]]
    assert cache.pool.cached_blocks == 0
    cache.check_integrity([sequence])
    cache.free(sequence)
    assert cache.reset() == (2, 0)
    assert hit_blocks(cache, [*prompt_of(2), 1]) == 0
    assert cache.pool.free_blocks == 16


def test_what_is_being_computed_can_be_awaited_until_it_is_there_or_given_up() -> None:
    cache = PrefixCache(16, SIZE)
    first = admit(cache, [*prompt_of(3), 1])
    awaited = cache.match(make_sequence(prompt_of(2) + prompt_of(1, 50))).awaited_key
    assert awaited == first.keys[1]
    assert cache.match(make_sequence(prompt_of(1))).awaited_key is None  # its only block is computed anyway
    first.computed_tokens = 2 * SIZE
    cache.register(first)
    assert not cache.is_claimed(awaited)
    assert cache.is_claimed(first.keys[2])
    cache.free(first)
    assert not cache.is_claimed(first.keys[2])


def _same_key_for_every_block(parent: BlockKey, tokens: list[int], block_size: int) -> list[BlockKey]:
    depth = 0 if parent == make_sequence([0]).root else parent[0] + 1
    return [BlockKey(bytes([depth + index]) * 16) for index in range(len(tokens) // block_size)]


def _keys_that_ignore_the_parent(parent: BlockKey, tokens: list[int], block_size: int) -> list[BlockKey]:
    blocks = [tokens[i : i + block_size] for i in range(0, len(tokens) - block_size + 1, block_size)]
    return [block_keys(BlockKey(b""), block, block_size)[0] for block in blocks]


class TrustingCache(PrefixCache):
    """Believes its keys, as a cache without comparison does."""

    def _same_content(self, sequence: Sequence, block_ids: list[int]) -> int:
        return len(block_ids)


def _last_answer(cache: PrefixCache, prompts: list[list[int]]) -> list[int]:
    runner = PoolRunner(cache.num_blocks, SIZE)
    answer: list[int] = []
    for prompt in prompts:
        sequence = make_sequence(prompt)
        assert cache.allocate(sequence, cache.match(sequence))
        while sequence.output_tokens < 6:
            assert cache.grow(sequence)
            chunk = Chunk(sequence, sequence.computed_tokens, len(sequence.tokens))
            token = runner.execute([chunk]).sampled[0]
            assert token is not None
            sequence.computed_tokens = chunk.end
            cache.register(sequence)
            sequence.tokens.append(token)
        cache.free(sequence)
        answer = sequence.tokens[len(prompt) :]
    return answer


@pytest.mark.parametrize(
    ("hasher", "before", "prompt"),
    [
        (_same_key_for_every_block, [prompt_of(3)], [*prompt_of(2, 100), 5]),
        (
            _keys_that_ignore_the_parent,
            [prompt_of(1) + prompt_of(1, 50), [*prompt_of(1, 10), 9]],
            [*prompt_of(1, 10), *prompt_of(1, 50), 5],
        ),
        (_keys_that_ignore_the_parent, [prompt_of(2)], [*prompt_of(1, 4), 5]),
    ],
    ids=["other tokens", "same tokens after another block", "same tokens as a first block"],
)
def test_a_collision_is_a_miss_and_would_have_been_a_wrong_answer_without_comparison(
    hasher: Callable[[BlockKey, list[int], int], list[BlockKey]], before: list[list[int]], prompt: list[int]
) -> None:
    right = answer_to(prompt, 6)
    cache = PrefixCache(16, SIZE, hasher)
    assert _last_answer(cache, [*before, prompt]) == right
    cache.check_integrity([])
    assert _last_answer(TrustingCache(16, SIZE, hasher), [*before, prompt]) != right


def test_after_a_collision_the_rest_of_the_chain_stays_private_until_the_key_is_free_again() -> None:
    cache = PrefixCache(8, SIZE, _same_key_for_every_block)
    first = admit(cache, prompt_of(1))
    compute(cache, first)
    second = admit(cache, prompt_of(3, 100))
    compute(cache, second)
    assert (second.registered_blocks, cache.held_blocks) == (0, 1)
    assert not any(cache.is_claimed(key) for key in second.keys)
    cache.check_integrity([first, second])
    cache.free(first)
    cache.reset()
    cache.register(second)
    assert (second.registered_blocks, cache.held_blocks) == (3, 3)
    cache.check_integrity([second])


def test_starting_over_announces_that_everything_is_gone() -> None:
    cache = PrefixCache(8, SIZE)
    remember(cache, prompt_of(3))
    stored = cache.take_events().stored
    cache.start_over()
    assert cache.take_events() == CacheEvents([], stored[::-1], [], [])
    assert cache.pool.free_blocks == 8
    cache.check_integrity([])


def _drop_a_parent(cache: PrefixCache, sequence: Sequence) -> None:
    cache.held.drop(sequence.block_ids[0])
    sequence.registered_blocks = 0


def _leak_a_reference(cache: PrefixCache, sequence: Sequence) -> None:
    cache.pool.share(sequence.block_ids[0])


def _point_a_key_elsewhere(cache: PrefixCache, sequence: Sequence) -> None:
    cache.held._table[sequence.keys[0]] = sequence.block_ids[1]


def _exchange_parents(cache: PrefixCache, sequence: Sequence) -> None:
    cache.held.parents[sequence.block_ids[1]] = sequence.block_ids[2]


def _claim_for_a_freed_sequence(cache: PrefixCache, sequence: Sequence) -> None:
    claimant = make_sequence([1])
    claimant.keys = [BlockKey(b"c" * 16)]
    cache._claims.claim(claimant)


@pytest.mark.parametrize(
    "damage",
    [_drop_a_parent, _leak_a_reference, _point_a_key_elsewhere, _exchange_parents, _claim_for_a_freed_sequence],
)
def test_the_integrity_check_sees(damage: Callable[[PrefixCache, Sequence], None]) -> None:
    cache = PrefixCache(8, SIZE)
    sequence = admit(cache, prompt_of(3))
    compute(cache, sequence)
    cache.check_integrity([sequence])
    damage(cache, sequence)
    with pytest.raises(IntegrityError):
        cache.check_integrity([sequence])


def test_the_integrity_check_sees_an_order_that_would_evict_a_parent_first() -> None:
    cache = PrefixCache(8, SIZE)
    sequence = admit(cache, prompt_of(2))
    compute(cache, sequence)
    sequence.block_ids.reverse()
    cache.free(sequence)
    with pytest.raises(IntegrityError, match="would outlive"):
        cache.check_integrity([])


def test_two_thousand_blocks_are_matched_allocated_and_freed_in_milliseconds() -> None:
    cache = PrefixCache(100_000, 16)
    prompt = [token * 7919 % 50_000 for token in range(2_000 * 16 + 1)]
    remember(cache, prompt)
    best_seconds = float("inf")
    for _ in range(5):
        sequence = make_sequence(prompt)
        cache.match(sequence)  # the keys are hashed once per request, which is not what is measured
        began = time.perf_counter()
        match = cache.match(sequence)
        assert cache.allocate(sequence, match)
        cache.free(sequence)
        best_seconds = min(best_seconds, time.perf_counter() - began)
        assert len(match.block_ids) == 2_000
    assert best_seconds < 0.02
