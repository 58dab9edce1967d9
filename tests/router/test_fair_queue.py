"""The line before the router, against a naive one and against what fairness promises."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fair_queue import FairQueue

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5, "": 1.0}
TENANTS = st.sampled_from(sorted(WEIGHTS))


class NaiveQueue:
    """All in one list; starts of all tenants remembered for as long as anybody waits."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, int]] = []
        self.starts: dict[str, float] = {}
        self.placed: dict[str, int] = {}
        self.places = 0
        self.now = 0.0

    def add(self, tenant: str, item: int) -> None:
        if not self._first(tenant):
            self._place(tenant, max(self.now, self.starts.get(tenant, 0.0)))
        self.waiting.append((tenant, item))

    def pop(self) -> int:
        tenant = min({tenant for tenant, _ in self.waiting}, key=lambda one: (self.starts[one], self.placed[one]))
        first = self._first(tenant)[0]
        self.now = self.starts[tenant]
        self._place(tenant, self.now + 1 / WEIGHTS[tenant])
        self._drop(first)
        return first

    def remove(self, item: int) -> None:
        self._drop(item)

    def _first(self, tenant: str) -> list[int]:
        return [item for other, item in self.waiting if other == tenant]

    def _place(self, tenant: str, start: float) -> None:
        self.places += 1
        self.starts[tenant], self.placed[tenant] = start, self.places

    def _drop(self, item: int) -> None:
        self.waiting = [entry for entry in self.waiting if entry[1] != item]
        if not self.waiting:
            self.starts, self.now = {}, 0.0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(TENANTS, st.just(None), st.integers(0, 20)), max_size=60))
def test_turns_are_those_of_a_naive_queue(steps: list[str | int | None]) -> None:
    """A tenant comes, somebody is served (None), or one of those that wait leaves."""
    queue: FairQueue[int] = FairQueue()
    naive = NaiveQueue()
    for number, step in enumerate(steps):
        match step:
            case str():
                queue.add(number, step, WEIGHTS[step])
                naive.add(step, number)
            case None if naive.waiting:
                assert queue.pop() == naive.pop()
            case int() if naive.waiting:
                item = naive.waiting[step % len(naive.waiting)][1]
                queue.remove(item)
                naive.remove(item)
        queue.check_integrity()
        assert len(queue) == len(naive.waiting)


@settings(max_examples=100, deadline=None)
@given(st.lists(TENANTS, max_size=30), st.lists(TENANTS, min_size=1, max_size=100))
def test_who_waits_all_the_time_gets_its_share_within_one_turn(before: list[str], comers: list[str]) -> None:
    """`a` and `b` always have somebody in line; others come and go as they like."""
    queue: FairQueue[int] = FairQueue()
    tenant_of: dict[int, str] = {}

    def come(tenant: str) -> None:
        number = len(tenant_of)
        tenant_of[number] = tenant
        queue.add(number, tenant, WEIGHTS[tenant])

    def serve() -> str:
        return tenant_of[queue.pop()]

    for tenant in before:
        come(tenant)
    for _ in range(len(before) // 2):
        serve()
    for tenant in ["a", "b"] * (2 * len(comers) + 1):
        come(tenant)
    served: Counter[str] = Counter()
    for tenant in comers:
        come(tenant)
        served[serve()] += 1
        assert abs(served["a"] / WEIGHTS["a"] - served["b"] / WEIGHTS["b"]) <= 1 / WEIGHTS["a"] + 1 / WEIGHTS["b"]


@given(st.lists(TENANTS, max_size=40))
def test_within_a_tenant_it_is_first_come_first_served(tenants: list[str]) -> None:
    queue: FairQueue[int] = FairQueue()
    for number, tenant in enumerate(tenants):
        queue.add(number, tenant, WEIGHTS[tenant])
    served = defaultdict(list)
    for _ in tenants:
        number = queue.pop()
        served[tenants[number]].append(number)
    assert all(numbers == sorted(numbers) for numbers in served.values())
    with pytest.raises(IndexError):
        queue.pop()


@pytest.mark.parametrize("cheat", ["stays away", "leaves and comes back"])
def test_nobody_saves_up_turns_or_gets_ahead_by_leaving(cheat: str) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()

    def come(tenant: str, numbers: range) -> None:
        for number in numbers:
            queue.add((tenant, number), tenant)

    come("steady", range(30))
    if cheat == "leaves and comes back":
        come("sly", range(1))
        first = [queue.pop()[0] for _ in range(2)]
        assert sorted(first) == ["sly", "steady"]
        for round_number in range(1, 4):  # each time at the end of its line, with nobody before it
            come("sly", range(round_number, round_number + 1))
            queue.remove(("sly", round_number))
        come("sly", range(10, 30))
    else:
        assert [queue.pop()[0] for _ in range(10)] == ["steady"] * 10
        come("sly", range(10, 30))
    served = Counter(queue.pop()[0] for _ in range(20))
    assert served == {"steady": 10, "sly": 10}


def test_a_weight_is_a_share() -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for number in range(100):
        queue.add(("heavy", number), "heavy", 3.0)
        queue.add(("light", number), "light", 1.0)
    served = Counter(queue.pop()[0] for _ in range(80))
    assert served == {"heavy": 60, "light": 20}


@pytest.mark.parametrize("leave", [FairQueue.pop, lambda queue: queue.remove(next(iter(queue._tenants)))])
def test_many_tenants_that_come_once_leave_nothing_behind(leave: Callable[[FairQueue[int]], object]) -> None:
    queue: FairQueue[int] = FairQueue()
    queue.add(-1, "stays")
    queue.add(-2, "stays")
    for number in range(5000):
        queue.add(number, f"tenant {number}")
        if len(queue) > 50:
            leave(queue)
    queue.check_integrity()
    while len(queue):
        queue.pop()
    queue.check_integrity()


def test_in_a_full_line_the_last_of_the_longest_gives_way_to_a_smaller_claim() -> None:
    queue: FairQueue[int] = FairQueue()
    assert queue.crowding_out("b") is None
    for number in range(4):
        queue.add(number, "a", 2.0)
    assert queue.crowding_out("b") == 3
    assert queue.crowding_out("a") is None
    queue.add(4, "b")
    assert queue.crowding_out("b") is None, "two for weight one are as many as four for weight two"
    assert queue.crowding_out("c", 0.4) is None
