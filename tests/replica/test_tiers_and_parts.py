"""Host memory behind the device, and parts of blocks: the cases that a random walk seldom meets."""

from __future__ import annotations

from array import array

import pytest

from replica.block_moves import Copy, Offload, Onload
from replica.block_pool import IntegrityError
from replica.cache_events import CacheEvents, TierChanges
from replica.host_tier import HostTier
from replica.prefix_cache import PrefixCache
from replica.sequence import Sequence
from shared.blocks import BlockKey, block_keys
from tests.replica.pool_runner import ROOT, make_sequence

SIZE = 4


def prompt_of(blocks: int, first: int = 0) -> list[int]:
    return list(range(first, first + blocks * SIZE))


def admit(cache: PrefixCache, prompt: list[int]) -> Sequence:
    sequence = make_sequence(prompt)
    assert cache.allocate(sequence, cache.match(sequence))
    return sequence


def remember(cache: PrefixCache, prompt: list[int]) -> Sequence:
    sequence = admit(cache, prompt)
    sequence.computed_tokens = len(prompt)
    cache.register(sequence)
    cache.free(sequence)
    cache.check_integrity([])
    return sequence


def test_a_chain_that_fills_host_memory_comes_back_whole_through_a_device_that_is_full() -> None:
    cache = PrefixCache(4, SIZE, host_blocks=3)
    remember(cache, prompt_of(3))
    remember(cache, prompt_of(4, 100))
    assert len(cache.host) == 3
    cache.take_moves()
    sequence = admit(cache, [*prompt_of(3), 9])
    assert sequence.computed_tokens == 3 * SIZE
    assert [type(move) for move in cache.take_moves()].count(Onload) == 3
    cache.check_integrity([sequence])


def test_what_is_not_worth_the_way_is_computed_and_leaves_host_memory_by_that() -> None:
    cache = PrefixCache(4, SIZE, host_blocks=8, worth_onloading=lambda tokens, behind: (tokens, behind) == (4, 8))
    remember(cache, prompt_of(3))
    remember(cache, prompt_of(4, 100))
    match = cache.match(make_sequence([*prompt_of(3), 9]))
    assert (match.block_ids, list(match.host_keys)) == ([], [])
    keys = block_keys(ROOT, prompt_of(3), SIZE)
    assert all(key in cache.host for key in keys)
    remember(cache, prompt_of(3))
    assert not any(key in cache.host for key in keys)
    assert cache.held_keys()[-3:] == keys


def test_a_collision_in_host_memory_is_a_miss_and_stays_private() -> None:
    def depth_only(parent: BlockKey, tokens: list[int], block_size: int) -> list[BlockKey]:
        depth = 0 if parent == ROOT else parent[0] + 1
        return [BlockKey(bytes([depth + index]) * 16) for index in range(len(tokens) // block_size)]

    cache = PrefixCache(4, SIZE, depth_only, host_blocks=8)
    remember(cache, prompt_of(2))
    filler = admit(cache, prompt_of(4, 100))
    assert len(cache.host) == 2
    cache.free(filler)
    other = admit(cache, [*prompt_of(2, 50), 1])
    assert other.computed_tokens == 0
    other.computed_tokens = 2 * SIZE
    cache.register(other)
    assert other.registered_blocks == 0
    assert len(cache.host) == 2
    cache.check_integrity([other])


def test_events_move_a_block_from_one_tier_to_the_other() -> None:
    cache = PrefixCache(3, SIZE, host_blocks=8)
    keys = block_keys(ROOT, prompt_of(3), SIZE)
    remember(cache, prompt_of(3))
    cache.take_events()
    remember(cache, prompt_of(1, 100))
    events = cache.take_events()
    assert (events.removed, events.host_stored) == ([keys[2]], [keys[2]])
    other = cache.held_keys()[-1]
    admit(cache, [*prompt_of(3)[:-1], 99])  # the last block is not asked for
    assert cache.take_events() == CacheEvents([], [other], [other], [])
    cache.start_over()
    assert cache.take_events() == CacheEvents([], [keys[1], keys[0]], [], [keys[2], other])
    assert cache.held_blocks == len(cache.host) == 0


def test_what_comes_back_is_announced_on_the_device_and_no_more_in_host_memory() -> None:
    cache = PrefixCache(4, SIZE, host_blocks=8)
    keys = block_keys(ROOT, prompt_of(3), SIZE)
    remember(cache, prompt_of(3))
    remember(cache, prompt_of(3, 100))
    cache.take_events()
    admit(cache, [*prompt_of(3), 9])
    events = cache.take_events()
    assert (events.stored, events.host_removed) == (keys[1:], keys[1:])


def test_an_evicted_block_is_read_before_anything_is_written_into_it() -> None:
    cache = PrefixCache(2, SIZE, host_blocks=4)
    remember(cache, prompt_of(2))
    remember(cache, prompt_of(2, 100))
    cache.take_moves()
    sequence = admit(cache, [*prompt_of(1), 9])
    moves = cache.take_moves()
    onload = next(move for move in moves if isinstance(move, Onload))
    offload = next(move for move in moves if isinstance(move, Offload) and move.source == onload.target)
    assert moves.index(offload) < moves.index(onload)
    cache.check_integrity([sequence])


def test_a_full_pool_reuses_the_part_in_place_when_its_block_is_the_last_one_left() -> None:
    cache = PrefixCache(1, SIZE, finer=True)
    block = remember(cache, [1, 2, 3, 4]).block_ids
    assert block == []
    sequence = admit(cache, [1, 2, 3, 9])
    assert sequence.computed_tokens == 3
    assert cache.take_moves() == []
    cache.check_integrity([sequence])


def test_a_part_is_copied_from_a_block_in_use_and_from_a_tail() -> None:
    cache = PrefixCache(16, SIZE, finer=True)
    first = admit(cache, prompt_of(2))
    first.computed_tokens = 2 * SIZE
    cache.register(first)
    second = admit(cache, [*prompt_of(1), 4, 5, 99, 98])
    assert second.computed_tokens == SIZE + 2
    assert cache.take_moves() == [Copy(first.block_ids[1], second.block_ids[1], 2)]
    cache.free(first)
    cache.free(second)
    remember(cache, [70, 71, 72])
    assert admit(cache, [70, 71, 72, 73, 74]).computed_tokens == 3


def test_the_last_token_is_computed_even_when_a_part_would_hold_it() -> None:
    cache = PrefixCache(16, SIZE, finer=True)
    remember(cache, prompt_of(2))
    assert admit(cache, prompt_of(2)[:7]).computed_tokens == 6
    assert admit(cache, prompt_of(2)).computed_tokens == 7


def test_less_than_eight_tokens_of_a_large_block_are_not_worth_a_copy() -> None:
    cache = PrefixCache(16, 64, finer=True)
    remember(cache, list(range(64)))
    assert admit(cache, [*range(7), 900, 901]).computed_tokens == 0
    assert admit(cache, [*range(8), 900, 901]).computed_tokens == 8


def test_a_longer_tail_replaces_the_one_it_goes_on_from() -> None:
    cache = PrefixCache(16, SIZE, finer=True)
    for prompt in ([1, 2], [1, 2, 3], [1, 2], [1, 5, 5]):
        remember(cache, prompt)
    tails = [array("I", content).tolist() for content in cache.held.contents if content is not None]
    assert sorted(tails) == [[1, 2, 3], [1, 5, 5]]
    remember(cache, [1, 2, 3, 4])
    assert cache.pool.cached_blocks == 2
    assert cache.held_blocks == 1


def test_tails_are_not_published_and_go_first_with_a_reset() -> None:
    cache = PrefixCache(16, SIZE, finer=True)
    remember(cache, [1, 2, 3])
    assert not cache.take_events()
    assert cache.reset() == (0, 0)
    assert cache.pool.free_blocks == 16


def test_the_host_tier_gives_up_the_oldest_and_tells() -> None:
    changes = TierChanges()
    tier = HostTier(2, changes)
    keys = [BlockKey(bytes([n]) * 16) for n in range(3)]
    first = tier.put(keys[0], ROOT, b"0")
    tier.put(keys[1], ROOT, b"1")
    third = tier.put(keys[2], ROOT, b"2")
    assert first is not None
    assert third is not None
    assert (third.place, third.pushed_out) == (first.place, 1)
    assert changes.take() == (keys[1:], [])
    assert not tier.has(keys[1], keys[0], b"1")
    assert not tier.has(keys[1], ROOT, b"2")
    taken = [tier.take(keys[1]), tier.take(keys[2])]
    assert tier.put(keys[0], ROOT, b"0") is None  # both places are on their way to the device
    for block in taken:
        tier.release(block)
    tier.check_integrity(lambda key: None)


def test_the_integrity_check_sees_a_place_lost_a_parent_given_up_first_and_a_block_in_both_tiers() -> None:
    keys = [BlockKey(bytes([n]) * 16) for n in range(2)]
    lost = HostTier(2, TierChanges())
    lost.put(keys[0], ROOT, b"0")
    lost.take(keys[0])
    backwards = HostTier(2, TierChanges())
    backwards.put(keys[0], ROOT, b"0")
    backwards.put(keys[1], keys[0], b"1")
    for tier in (lost, backwards):
        with pytest.raises(IntegrityError):
            tier.check_integrity(lambda key: None)
    twice = HostTier(2, TierChanges())
    twice.put(keys[0], ROOT, b"0")
    with pytest.raises(IntegrityError, match="both tiers"):
        twice.check_integrity(lambda key: 0)
