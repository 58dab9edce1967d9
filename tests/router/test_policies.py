"""Each policy does what its name says, and all see the same candidates."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from router.policies import POLICIES, UnknownPolicyError, build_policy
from router.policies.base import Candidate, Request
from shared.blocks import PublishedKey


def candidate(replica_id: str, **changes: Any) -> Candidate:
    fields: dict[str, Any] = {
        "replica_id": replica_id,
        "held_blocks": 0,
        "held_tokens": 0,
        "matched_tokens": 0,
        "trust": 1.0,
        "wait_seconds": 0.0,
        "service_seconds": 0.1,
        "guard_seconds": 0.0,
        "cost_seconds": 0.1,
        "active": 0,
    }
    return Candidate(**{**fields, **changes})


def request(*keys: int, session: bytes = b"") -> Request:
    return Request(
        prompt_tokens=16 * len(keys) + 1, keys=[PublishedKey(key) for key in keys], block_size=16, session=session
    )


def chosen(policy: str, candidates: list[Candidate], asked: Request | None = None) -> str:
    return build_policy(policy, random.Random(0)).choose(asked or request(1, 2), candidates).candidate.replica_id


def test_an_unknown_policy_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UnknownPolicyError, match="cache-aware, round-robin, random, least-loaded"):
        build_policy("warmest")


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_picks_one_of_the_candidates_and_gives_its_name_and_reason(name: str) -> None:
    policy = build_policy(name, random.Random(0))
    assert policy.name == name
    for count in (1, 2, 5):
        candidates = [candidate(f"r{number}", active=number) for number in range(count)]
        for number in range(20):
            pick = policy.choose(request(number), candidates)
            assert pick.candidate in candidates
            assert pick.reason
            policy.placed(request(number), pick.candidate.replica_id)


def test_round_robin_takes_turns_by_id_and_a_dry_run_takes_nobodys_turn() -> None:
    policy = build_policy("round-robin")
    candidates = [candidate("c"), candidate("a"), candidate("b")]
    turns = []
    for _ in range(6):
        policy.choose(request(1), candidates)
        pick = policy.choose(request(1), candidates)
        policy.placed(request(1), pick.candidate.replica_id)
        turns.append(pick.candidate.replica_id)
    assert turns == ["a", "b", "c", "a", "b", "c"]


def test_round_robin_goes_on_where_its_last_replica_has_left() -> None:
    policy = build_policy("round-robin")
    policy.placed(request(1), "b")
    assert policy.choose(request(1), [candidate("a"), candidate("c")]).candidate.replica_id == "c"


def test_random_reaches_everyone() -> None:
    policy = build_policy("random", random.Random(0))
    candidates = [candidate(name) for name in "abcd"]
    drawn = Counter(policy.choose(request(1), candidates).candidate.replica_id for _ in range(400))
    assert min(drawn[name] for name in "abcd") > 60


def test_least_loaded_takes_the_fewest_active_whatever_is_cached() -> None:
    assert chosen("least-loaded", [candidate("a", active=2, matched_tokens=32), candidate("b", active=1)]) == "b"


def test_two_choices_takes_the_less_busy_of_those_drawn() -> None:
    assert chosen("two-choices", [candidate("a", active=2), candidate("b", active=1)]) == "b"


def test_longest_prefix_takes_the_deepest_holder_however_busy() -> None:
    candidates = [
        candidate("a", matched_tokens=16),
        candidate("b", matched_tokens=32, active=90),
        candidate("c", matched_tokens=32, active=91),
    ]
    assert chosen("longest-prefix", candidates) == "b"


def test_consistent_hash_keeps_a_conversation_together_until_its_replica_is_full() -> None:
    policy = build_policy("consistent-hash")
    names = "abcd"
    idle = [candidate(name) for name in names]
    home = policy.choose(request(*range(8)), idle)
    longer = policy.choose(request(*range(20)), idle)
    assert (home.reason, longer.candidate.replica_id) == ("hashed", home.candidate.replica_id)
    busy = [candidate(name, active=9 if name == home.candidate.replica_id else 3) for name in names]
    moved = policy.choose(request(*range(8)), busy)
    assert moved.reason == "hash-overflow"
    assert moved.candidate.replica_id != home.candidate.replica_id


def test_consistent_hash_moves_only_the_share_of_a_replica_that_left() -> None:
    policy = build_policy("consistent-hash")
    before = {n: policy.choose(request(n), [candidate(c) for c in "abcd"]).candidate.replica_id for n in range(400)}
    after = {n: policy.choose(request(n), [candidate(c) for c in "abc"]).candidate.replica_id for n in range(400)}
    assert all(after[n] == before[n] for n in before if before[n] != "d")
    assert min(Counter(before.values()).values()) > 60


def test_a_session_stays_where_it_was_and_moves_when_its_replica_is_gone() -> None:
    policy = build_policy("session")
    asked = request(1, session=b"alice")
    policy.placed(asked, "b")
    stays = policy.choose(request(99, session=b"alice"), [candidate("a"), candidate("b", active=5)])
    assert (stays.candidate.replica_id, stays.reason) == ("b", "session")
    moves = policy.choose(asked, [candidate("a"), candidate("c", active=1)])
    assert (moves.candidate.replica_id, moves.reason) == ("a", "new-session")


def test_cache_aware_takes_the_lowest_cost_and_says_why() -> None:
    policy = build_policy("cache-aware")
    warm = candidate("a", held_blocks=2, held_tokens=32, matched_tokens=32, cost_seconds=0.1)
    cold = candidate("b", cost_seconds=0.5)
    assert policy.choose(request(1, 2), [cold, warm]).reason == "warm"
    queued = candidate("a", held_blocks=2, held_tokens=32, matched_tokens=32, cost_seconds=0.9, wait_seconds=0.8)
    pick = policy.choose(request(1, 2), [queued, cold])
    assert (pick.candidate.replica_id, pick.reason) == ("b", "spread")
    assert policy.choose(request(1, 2), [cold]).reason == "cold"
    promised = candidate("a", matched_tokens=32, cost_seconds=0.1)
    assert policy.choose(request(1, 2), [promised, cold]).reason == "promised"


def test_cache_aware_breaks_near_ties_by_fewest_active_then_by_content() -> None:
    near = [candidate("a", cost_seconds=0.1, active=1), candidate("b", cost_seconds=0.1004)]
    assert chosen("cache-aware", near) == "b"
    equal = [candidate(name) for name in "abcd"]
    spread = Counter(chosen("cache-aware", equal, request(number)) for number in range(200))
    assert set(spread) == set("abcd")


def test_cache_aware_does_not_compute_again_what_costs_no_more_to_wait_for() -> None:
    being_computed = candidate(
        "a", matched_tokens=32, wait_seconds=1.0, service_seconds=0.01, cost_seconds=1.01, active=1
    )
    idle = candidate("b", service_seconds=1.0, cost_seconds=1.0)
    assert chosen("cache-aware", [being_computed, idle]) == "a"


def test_ties_are_broken_by_what_is_not_shared_anyway() -> None:
    everyone_holds_one = [candidate(name, held_blocks=1, held_tokens=16, matched_tokens=16) for name in "abcd"]
    spread = Counter(chosen("cache-aware", everyone_holds_one, request(7, number)) for number in range(200))
    assert set(spread) == set("abcd")


def test_a_named_session_decides_among_near_ties_alone() -> None:
    equal = [candidate(name) for name in "abcd"]
    homes = {name: chosen("cache-aware", equal, request(1, session=name.encode())) for name in map(str, range(200))}
    assert min(Counter(homes.values()).values()) > 25, "sessions spread"
    for name, home in homes.items():
        asked = request(99, session=name.encode())
        assert chosen("cache-aware", equal, asked) == home, "whatever the prompt"
        others = [candidate(other) for other in "abcd" if other != home]
        deeper = candidate("deep", held_blocks=1, held_tokens=16, matched_tokens=16, service_seconds=0.09)
        assert chosen("cache-aware", [candidate(home, active=1), *others], asked) != home, "never above load"
        assert chosen("cache-aware", [candidate(home, cost_seconds=0.11), *others], asked) != home, "nor above cost"
        assert chosen("cache-aware", [candidate(home), *others, deeper], asked) == "deep", "nor above a deeper cache"


def test_prefix_tree_follows_what_was_sent_for_more_than_half_a_match_and_else_evens_out() -> None:
    policy = build_policy("prefix-tree")
    candidates = [candidate(name) for name in "ab"]
    policy.placed(request(1, 2, 3, 4), "a")
    stays = policy.choose(request(1, 2, 3, 9), candidates)
    assert (stays.candidate.replica_id, stays.reason) == ("a", "sent-before")
    evens = policy.choose(request(1, 8, 9, 10), candidates)
    assert (evens.candidate.replica_id, evens.reason) == ("b", "least-sent")
    busy = [candidate("a", active=70), candidate("b", active=5)]
    away = policy.choose(request(1, 2, 3, 4), busy)
    assert (away.candidate.replica_id, away.reason) == ("b", "unbalanced")
