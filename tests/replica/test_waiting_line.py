"""Whose turn it is: order within a tenant, shares between tenants, and nobody forgotten."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from replica.sequence import Sequence
from replica.waiting_line import WaitingLine
from tests.replica.pool_runner import make_sequence


def waiting(tenant: str, tokens: int = 10) -> Sequence:
    sequence = make_sequence([1] * tokens)
    sequence.tenant = tenant
    return sequence


def serve(line: WaitingLine) -> Sequence:
    """Admit whose turn it is, and charge its tenant."""
    sequence = next(line.in_turn())
    assert line.remove(sequence.request_id) is sequence
    line.charge(sequence.tenant, len(sequence.tokens))
    return sequence


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    line = WaitingLine()
    arrived = [waiting("a", tokens) for tokens in (30, 1, 20, 5)]
    for sequence in arrived:
        line.add(sequence)
    assert [serve(line) for _ in arrived] == arrived
    assert (len(line), line.tokens) == (0, 0)


def test_a_newcomer_waits_for_one_request_of_a_flood_and_not_for_all() -> None:
    line = WaitingLine()
    for _ in range(100):
        line.add(waiting("flood"))
    for _ in range(50):
        serve(line)
    line.add(light := waiting("light"))
    assert light in [serve(line) for _ in range(2)]


def test_tenants_that_always_wait_share_by_tokens_and_not_by_requests() -> None:
    line, served = WaitingLine(), Counter[str]()
    sizes = {"long": 400, "short": 10, "middle": 90}
    for tenant, tokens in sizes.items():
        line.add(waiting(tenant, tokens))
    for _ in range(3000):
        sequence = serve(line)
        served[sequence.tenant] += len(sequence.tokens)
        line.add(waiting(sequence.tenant, sizes[sequence.tenant]))
        assert max(served.values()) - min(served[tenant] for tenant in sizes) <= 2 * max(sizes.values())


def test_what_is_decoded_counts_like_what_is_prefilled() -> None:
    line = WaitingLine()
    for tenant in "ab":
        line.add(waiting(tenant))
        line.add(waiting(tenant))
    line.charge("a", 1000)
    assert [serve(line).tenant for _ in range(4)] == ["b", "b", "a", "a"]


def test_time_away_from_the_line_is_no_credit() -> None:
    line = WaitingLine()
    for _ in range(200):
        line.add(waiting("busy"))
        line.add(waiting("also busy"))
    for _ in range(100):
        serve(line)
    for _ in range(20):
        line.add(waiting("idle so far"))
    tenants = Counter(serve(line).tenant for _ in range(30))
    assert tenants == {"busy": 10, "also busy": 10, "idle so far": 10}


def test_leaving_the_line_does_not_clear_what_was_had_ahead_of_others() -> None:
    line = WaitingLine()
    for _ in range(50):
        line.add(waiting("patient"))
    turns = []
    for _ in range(20):  # one long request at a time, never two in line
        if not any(sequence.tenant == "greedy" for sequence in line):
            line.add(waiting("greedy", 40))
        turns.append(serve(line).tenant)
    # By tokens, four requests of the patient tenant weigh as much as one of the greedy one.
    assert Counter(turns) == {"patient": 16, "greedy": 4}


def test_whoever_waits_is_served_however_many_new_tenants_come() -> None:
    line = WaitingLine()
    line.add(waiting("old", 1000))
    line.add(late := waiting("old", 1000))
    serve(line)
    for number in itertools.count():
        line.add(waiting(f"new {number}"))
        if number % 2:  # the line grows all the while
            continue
        if serve(line) is late:
            break
        assert number < 2000


def test_of_equal_tenants_the_first_to_come_is_served_first() -> None:
    line = WaitingLine()
    arrived = [waiting(tenant) for tenant in "cabd"]
    for sequence in arrived:
        line.add(sequence)
    assert [serve(line) for _ in arrived] == arrived


def test_the_preempted_go_first_the_earlier_admitted_before_the_later() -> None:
    line = WaitingLine()
    line.add(other := waiting("a"))
    first, second = waiting("b"), waiting("b")
    for victim in (second, first):
        line.put_back(victim)
    assert list(line.in_turn()) == [first, second, other]
    assert line.tokens == 30
    assert first.request_id in line
    assert line.remove(first.request_id) is first
    assert line.remove(first.request_id) is None


def test_who_is_passed_over_keeps_its_place_and_all_others_get_their_turn() -> None:
    line = WaitingLine()
    arrived = [waiting("a"), waiting("b"), waiting("a"), waiting("b")]
    for sequence in arrived:
        line.add(sequence)
    line.charge("a", 1)
    assert list(line.in_turn()) == [arrived[1], arrived[3], arrived[0], arrived[2]]
    assert next(line.in_turn()) is arrived[1]


@pytest.mark.parametrize("seed", range(5))
def test_every_sequence_comes_out_once_or_is_removed(seed: int) -> None:
    line, random_ = WaitingLine(), random.Random(seed)
    inside: dict[str, Sequence] = {}
    for _ in range(2000):
        match random_.randrange(4):
            case 0 | 1:
                sequence = waiting(f"t{random_.randrange(6)}", random_.randrange(1, 50))
                inside[sequence.request_id] = sequence
                line.add(sequence)
            case 2 if inside:
                gone = random_.choice(list(inside))
                assert line.remove(gone) is inside.pop(gone)
            case _ if inside:
                sequence = serve(line)
                del inside[sequence.request_id]
                if random_.random() < 0.2:
                    inside[sequence.request_id] = sequence
                    line.put_back(sequence)
        assert len(line) == len(inside)
        assert line.tokens == sum(len(sequence.tokens) for sequence in inside.values())
    assert set(line.in_turn()) == set(line) == set(inside.values())


def test_a_million_tenants_that_came_once_are_not_remembered() -> None:
    line = WaitingLine()
    line.add(waiting("one that stays", 10**6))
    for number in range(20_000):
        line.add(waiting(f"t{number}", 1))
        serve(line)
    assert len(line._served) < 2000
