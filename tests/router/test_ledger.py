"""Counters that go up come down, once, and waits run down with the clock."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.ledger import Dispatch, Ledger
from shared.blocks import PublishedKey


def keys(*numbers: int) -> list[PublishedKey]:
    return [PublishedKey(number) for number in numbers]


def dispatch(ledger: Ledger, now: float, seconds: float = 1.0, *, streamed: bool = True) -> Dispatch:
    return ledger.dispatch("a", now, service_seconds=seconds, uncached_tokens=100, streamed=streamed)


def test_a_burst_is_counted_before_anything_comes_back() -> None:
    ledger = Ledger()
    for _ in range(5):
        dispatch(ledger, 0.0)
    assert ledger.active("a") == 5
    assert ledger.standing("a", 0.0).wait_seconds == pytest.approx(5.0)
    assert ledger.standing("a", 0.0).pending_tokens == 500


def test_the_wait_runs_down_with_the_clock_and_is_corrected_at_the_first_token() -> None:
    ledger = Ledger()
    first, second = dispatch(ledger, 0.0), dispatch(ledger, 0.0)
    assert ledger.standing("a", 0.4).wait_seconds == pytest.approx(1.6)
    assert ledger.first_token(first, 0.5) == pytest.approx(0.5)
    assert ledger.standing("a", 0.5).wait_seconds == pytest.approx(1.0)
    assert ledger.first_token(second, 2.0) == pytest.approx(1.5), "measured from the first token before it"
    assert ledger.standing("a", 2.0).wait_seconds == 0.0
    assert ledger.standing("a", 2.0).decoding == 2


def test_an_overdue_replica_looks_busier_and_busier() -> None:
    ledger = Ledger()
    dispatch(ledger, 0.0)
    assert ledger.standing("a", 1.0).wait_seconds == pytest.approx(0.0)
    assert ledger.standing("a", 31.0).wait_seconds == pytest.approx(30.0)


def test_a_first_token_out_of_order_teaches_nothing_and_keeps_the_head() -> None:
    ledger = Ledger()
    dispatch(ledger, 0.0)
    overtaker = dispatch(ledger, 0.0)
    assert ledger.first_token(overtaker, 0.3) is None
    assert ledger.standing("a", 0.3).wait_seconds == pytest.approx(0.7)


def test_an_answer_in_one_piece_leaves_the_backlog_when_its_estimate_has_passed_but_stays_active() -> None:
    ledger = Ledger()
    whole = dispatch(ledger, 0.0, streamed=False)
    dispatch(ledger, 0.0)
    assert ledger.standing("a", 1.5).wait_seconds == pytest.approx(0.5)
    assert ledger.active("a") == 2
    assert ledger.standing("a", 2.0).decoding == 1
    ledger.release(whole, 9.0)
    assert ledger.active("a") == 1


def test_a_release_counts_once_and_a_late_first_token_not_at_all() -> None:
    ledger = Ledger()
    first = dispatch(ledger, 0.0)
    dispatch(ledger, 0.0)
    ledger.release(first, 0.1)
    ledger.release(first, 0.2)
    assert ledger.first_token(first, 0.3) is None
    assert ledger.active("a") == 1
    assert ledger.standing("a", 0.1).wait_seconds == pytest.approx(1.0)


def test_promises_are_counted_by_reference_and_live_as_long_as_their_request() -> None:
    ledger = Ledger()
    chain = keys(1, 2, 3, 4)
    first = ledger.dispatch("a", 0.0, service_seconds=1, uncached_tokens=64, promised=chain)
    second = ledger.dispatch("a", 0.0, service_seconds=1, uncached_tokens=64, promised=chain[:2])
    assert ledger.promised_depth("a", keys(1, 2, 3, 4, 5), 0) == 4
    assert ledger.promised_depth("b", chain, 0) == 0
    ledger.first_token(first, 0.5)
    assert ledger.promised_depth("a", chain, 0) == 4, "computed, perhaps not yet published"
    ledger.release(first, 1.0)
    assert ledger.promised_depth("a", chain, 0) == 2
    ledger.release(second, 1.0)
    assert ledger.promised_depth("a", chain, 0) == 0


def test_a_promise_continues_what_is_held() -> None:
    ledger = Ledger()
    ledger.dispatch("a", 0.0, service_seconds=1, uncached_tokens=64, promised=keys(3, 4))
    chain = keys(1, 2, 3, 4, 5)
    assert ledger.promised_depth("a", chain, 2) == 4
    assert ledger.promised_depth("a", chain, 3) == 4, "a block of it was published meanwhile"
    assert ledger.promised_depth("a", chain, 1) == 1, "the held part was evicted: what follows cannot be hit"


def test_the_backlog_share_is_a_smoothed_minute() -> None:
    ledger = Ledger()
    first = dispatch(ledger, 0.0)
    assert ledger.standing("a", 60.0).backlog_share == pytest.approx(1 - 1 / 2.718281828, rel=1e-6)
    ledger.first_token(first, 60.0)
    assert ledger.standing("a", 660.0).backlog_share < 0.001


def test_a_refresh_of_the_fleet_never_zeroes_load() -> None:
    ledger = Ledger()
    under_way = dispatch(ledger, 0.0)
    ledger.retain([])
    assert ledger.active("a") == 1
    ledger.release(under_way, 1.0)
    ledger.retain([])
    assert ledger.active("a") == 0
    ledger.check_integrity()


@given(st.integers(0, 2**32), st.integers(1, 120))
def test_random_histories_end_at_zero(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    ledger, now = Ledger(), 0.0
    alive: list[Dispatch] = []
    for _ in range(steps):
        now += rng.choice([0.0, 0.01, 0.5])
        action = rng.random()
        if action < 0.5 or not alive:
            chain = keys(*range(rng.randrange(3), rng.randrange(6)))
            alive.append(
                ledger.dispatch(
                    rng.choice("abc"),
                    now,
                    service_seconds=rng.random(),
                    uncached_tokens=rng.randrange(1000),
                    promised=chain,
                    streamed=rng.random() < 0.7,
                )
            )
        elif action < 0.7:
            ledger.first_token(rng.choice(alive), now)
        else:
            ledger.release(alive.pop(rng.randrange(len(alive))), now)
        assert all(ledger.standing(replica, now).wait_seconds >= 0 for replica in "abc")
        ledger.check_integrity()
    for left in alive:
        ledger.release(left, now)
    ledger.check_integrity()
    assert ledger.total_active == 0
    assert all(
        ledger.standing(replica, now).wait_seconds == 0 and ledger.standing(replica, now).pending_tokens == 0
        for replica in "abc"
    )
    assert all(ledger.promised_depth(replica, keys(*range(6)), 0) == 0 for replica in "abc")


def test_what_came_in_lately_fades_within_minutes() -> None:
    ledger = Ledger()
    ledger.release(dispatch(ledger, 0.0), 1.0)
    assert ledger.standing("a", 1.0).filled_tokens == pytest.approx(100, rel=0.01)
    assert ledger.standing("a", 600.0).filled_tokens == pytest.approx(100 * 0.3679, rel=0.01)
    ledger.check_integrity()
