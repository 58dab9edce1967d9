"""The approximate view of silent replicas, and how far any view is believed."""

from __future__ import annotations

from router.sent_view import SentView
from router.trust import Trust
from shared.blocks import PublishedKey


def chain(start: int, length: int) -> list[PublishedKey]:
    return [PublishedKey(number) for number in range(start, start + length)]


def test_what_was_sent_is_matched_from_the_first_block_on() -> None:
    view = SentView()
    view.record("a", chain(0, 10), 0.0)
    assert view.depth("a", chain(0, 12), 1.0) == 10
    assert view.depth("a", chain(0, 4) + chain(100, 4), 1.0) == 4
    assert view.depth("a", chain(5, 5), 1.0) == 5
    assert view.depth("b", chain(0, 10), 1.0) == 0


def test_it_is_bounded_and_forgets_tails_before_heads() -> None:
    view = SentView(max_blocks=10)
    view.record("a", chain(0, 8), 0.0)
    view.record("a", chain(100, 6), 1.0)
    assert view.depth("a", chain(100, 6), 1.0) == 6
    assert view.depth("a", chain(0, 8), 1.0) == 4


def test_one_chain_longer_than_the_bound_keeps_its_head() -> None:
    view = SentView(max_blocks=10)
    view.record("a", chain(0, 50), 0.0)
    assert view.depth("a", chain(0, 50), 0.0) == 10


def test_it_ages() -> None:
    view = SentView(max_age_seconds=60)
    view.record("a", chain(0, 8), 0.0)
    view.record("a", chain(0, 3), 50.0)
    assert view.depth("a", chain(0, 8), 59.0) == 8
    assert view.depth("a", chain(0, 8), 61.0) == 3
    view.record("a", chain(500, 1), 200.0)
    assert view.depth("a", chain(0, 8), 200.0) == 0


def test_a_replica_that_left_is_forgotten() -> None:
    view, trust = SentView(), Trust()
    view.record("a", chain(0, 3), 0.0)
    trust.observe("a", 1000, 0, 16)
    view.retain(["b"])
    trust.retain(["b"])
    assert view.depth("a", chain(0, 3), 0.0) == 0
    assert trust.factor("a") == 1.0


def test_trust_falls_with_hits_that_never_come_has_a_floor_and_is_earned_back() -> None:
    trust = Trust()
    for _ in range(100):
        trust.observe("a", 1000, 0, 16)
    assert 0 < trust.factor("a") <= 0.05
    assert trust.factor("b") == 1.0
    for _ in range(100):
        trust.observe("a", 1000, 1000, 16)
    assert trust.factor("a") > 0.95


def test_a_change_between_doubt_and_belief_is_told_once() -> None:
    trust, told = Trust(), list[tuple[str, bool]]()
    trust.subscribe(lambda replica_id, doubted: told.append((replica_id, doubted)))
    for _ in range(50):
        trust.observe("a", 1000, 0, 16)
        trust.observe("b", 1000, 1000, 16)
    assert told == [("a", True)]
    assert (trust.doubted("a"), trust.doubted("b"), trust.doubted("c")) == (True, False, False)
    while trust.factor("a") < 0.8:
        trust.observe("a", 1000, 1000, 16)
    for cached in (0, 1000) * 20:
        trust.observe("a", 1000, cached, 16)
    assert told == [("a", True)], "wavering is no change"
    for _ in range(100):
        trust.observe("a", 1000, 1000, 16)
    assert told == [("a", True), ("a", False)]
    for _ in range(50):
        trust.observe("a", 1000, 0, 16)
    trust.retain(["b"])
    assert not trust.doubted("a")


def test_less_than_a_block_short_costs_no_trust() -> None:
    trust = Trust()
    trust.observe("a", 1000, 985, 16)
    trust.observe("a", 1000, 1600, 16)
    trust.observe("a", 10, 0, 16)
    assert trust.factor("a") == 1.0
