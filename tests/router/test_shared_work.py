"""Several routers' ledgers agree on what is under way, whatever is lost between them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.ledger import Dispatch, Ledger
from router.shared_work import Journal, OthersWork
from shared.blocks import PublishedKey
from shared.fleet_state import LEASE_SECONDS
from shared.work_events import Dispatched, FirstToken, WorkBatch

CHAIN = [PublishedKey(number) for number in range(10)]


class Desk:
    """One router's books, and what it knows of others."""

    def __init__(self, name: str) -> None:
        self.ledger = Ledger()
        self.journal = Journal(name)
        self.others = OthersWork(self.ledger, {"r0", "r1"}.__contains__)

    def send(self, replica_id: str = "r0", now: float = 0.0, seconds: float = 1.0, keys: int = 10) -> Dispatch:
        dispatch = self.ledger.dispatch(
            replica_id, now, service_seconds=seconds, uncached_tokens=100, promised=CHAIN[:keys]
        )
        self.journal.dispatched(dispatch)
        return dispatch

    def answer(self, dispatch: Dispatch, now: float) -> None:
        self.ledger.first_token(dispatch, now)
        self.journal.first_token(dispatch)

    def end(self, dispatch: Dispatch, now: float) -> None:
        self.ledger.release(dispatch, now)
        self.journal.ended(dispatch)


def test_work_and_promises_of_one_router_are_seen_by_another_until_they_end() -> None:
    here, there = Desk("here"), Desk("there")
    dispatch = here.send()
    there.others.apply(here.journal.take(), 0.0)
    standing = there.ledger.standing("r0", 0.2)
    assert standing.wait_seconds == pytest.approx(0.8)
    assert (standing.active, standing.pending_tokens, standing.filled_tokens > 99) == (1, 100, True)
    assert there.ledger.promised_depth("r0", CHAIN, 0) == 10
    here.answer(dispatch, 1.0)
    there.others.apply(here.journal.take(), 1.0)
    assert (there.ledger.standing("r0", 1.0).decoding, there.ledger.standing("r0", 1.0).wait_seconds) == (1, 0.0)
    here.end(dispatch, 2.0)
    there.others.apply(here.journal.take(), 2.0)
    assert there.ledger.total_active == 0
    assert there.ledger.promised_depth("r0", CHAIN, 0) == 0


def test_a_batch_that_was_missed_may_have_held_an_end() -> None:
    here, there = Desk("here"), Desk("there")
    dispatch = here.send()
    there.others.apply(here.journal.take(), 0.0)
    here.end(dispatch, 1.0)
    here.journal.take()  # lost: the stream was trimmed
    here.send("r1", 1.0)
    there.others.apply(here.journal.take(), 1.0)
    assert (there.ledger.active("r0"), there.ledger.active("r1")) == (0, 1)


def test_a_router_that_is_not_heard_of_any_more_takes_its_work_along() -> None:
    here, there = Desk("here"), Desk("there")
    here.send()
    assert there.others.apply(here.journal.take(), 0.0)
    assert not there.others.apply(here.journal.take(), 1.0)
    there.others.expire(1.0 + LEASE_SECONDS)
    assert there.ledger.active("r0") == 1
    there.others.expire(1.1 + LEASE_SECONDS)
    assert (there.ledger.active("r0"), len(there.others)) == (0, 0)


def test_who_comes_late_is_told_all_that_is_under_way() -> None:
    here, there = Desk("here"), Desk("there")
    here.end(here.send(), 0.0)
    answered = here.send()
    here.answer(answered, 0.5)
    here.send("r1")
    here.journal.take()
    here.journal.begin_afresh()
    there.others.apply(here.journal.take(), 1.0)
    assert (there.ledger.standing("r0", 1.0).decoding, there.ledger.active("r1")) == (1, 1)


def test_what_nobody_fetches_does_not_pile_up_and_is_told_afresh() -> None:
    here, there = Desk("here"), Desk("there")
    there.others.apply(here.journal.take(), 0.0)
    kept = here.send("r1")
    for _ in range(5000):
        here.end(here.send(), 0.0)
    assert len(here.journal) < 4096
    batch = here.journal.take()
    assert batch.fresh
    assert len(batch.events) == 1
    there.others.apply(batch, 0.0)
    assert there.ledger.total_active == 1
    here.end(kept, 0.0)


def test_what_makes_no_sense_is_passed_over() -> None:
    there = Desk("there")
    strange = Dispatched(1, "nobody", 1.0, 1, True, b"")
    odd = Dispatched(2, "r0", float("nan"), 1, True, b"")
    torn = Dispatched(3, "r0", 1.0, 1, True, b"123")
    there.others.apply(WorkBatch("x", 1, True, [strange, odd, torn, FirstToken(9)]), 0.0)
    assert there.ledger.total_active == 0


def test_a_long_promise_is_told_by_its_beginning() -> None:
    here, there = Desk("here"), Desk("there")
    chain = [PublishedKey(number) for number in range(5000)]
    here.journal.dispatched(here.ledger.dispatch("r0", 0.0, service_seconds=1, uncached_tokens=1, promised=chain))
    there.others.apply(here.journal.take(), 0.0)
    assert there.ledger.promised_depth("r0", chain, 0) == 512


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 80))
def test_whatever_is_lost_between_them_everything_ends_at_zero(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    here, there = Desk("here"), Desk("there")
    alive: list[Dispatch] = []
    now = 0.0
    for _ in range(steps):
        now += rng.random()
        action = rng.random()
        if action < 0.4:
            alive.append(here.send(rng.choice(["r0", "r1"]), now, rng.random(), rng.randrange(10)))
        elif action < 0.5 and alive:
            here.answer(rng.choice(alive), now)
        elif action < 0.7 and alive:
            here.end(alive.pop(rng.randrange(len(alive))), now)
        else:
            batch = here.journal.take()
            if rng.random() < 0.8:
                there.others.apply(batch, now)
        if rng.random() < 0.05:
            here.journal.begin_afresh()
        there.ledger.check_integrity()
    here.journal.begin_afresh()
    there.others.apply(here.journal.take(), now)
    assert there.ledger.total_active == here.ledger.total_active == len(alive), "told afresh, both agree"
    for dispatch in alive:
        here.end(dispatch, now)
    there.others.apply(here.journal.take(), now)
    there.ledger.check_integrity()
    assert there.ledger.total_active == 0
