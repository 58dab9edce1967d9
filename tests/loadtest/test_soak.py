"""A soak passes on a router that is well, and says what leaks on one that is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.soak import soak
from loadtest.soak_verdict import Fault, Reply, Sample, failures, leaks

_MIB = 2**20
_WELL = Sample(resident_bytes=100 * _MIB, descriptors=20, threads=5, tasks=6, in_flight=0, active=0)


async def test_a_short_soak_with_faults_passes() -> None:
    lines: list[str] = []
    assert await soak(15, 3, lines.append) == []
    assert "'ok'" in lines[-1]


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        (replace(_WELL, in_flight=1), "the counter in_flight leaks: it is 1"),
        (replace(_WELL, active=2), "the counter active leaks: it is 2"),
        (replace(_WELL, descriptors=53), "descriptors leak: 20 before the load, 53 after it"),
        (replace(_WELL, threads=10), "threads leak: 5 before the load, 10 after it"),
        (replace(_WELL, tasks=9), "tasks leak: 6 before the load, 9 after it"),
    ],
)
def test_what_is_left_when_nothing_is_under_way_leaks(after: Sample, sentence: str) -> None:
    (found,) = leaks(_WELL, [_WELL] * 60, after)
    assert found.startswith(sentence)


def test_memory_may_grow_while_caches_fill_and_no_longer() -> None:
    filling = [replace(_WELL, resident_bytes=min(200, 100 + 4 * second) * _MIB) for second in range(60)]
    leaking = [replace(_WELL, resident_bytes=(100 + 2 * second) * _MIB) for second in range(60)]
    assert leaks(_WELL, filling, _WELL) == []
    (found,) = leaks(_WELL, leaking, _WELL)
    assert found.startswith("memory grew by 30.0 MiB from the third to the last quarter; at most 24.7 may be")


def test_what_a_fault_explains_is_no_failure_and_nothing_else_is_excused() -> None:
    fault = Fault("kill r1", 10.0, 20.0)
    during = [Reply(outcome, 9.0, 11.0) for outcome in ("502", "503", "504", "429", "told", "cut")]
    assert failures(during, [fault], []) == []
    assert failures([Reply("502", 20.5, 21.0)] * 2, [fault], []) == ["2 requests ended as '502' though no fault was on"]
    for outcome in ("500", "404", "late", "incomplete"):
        assert failures([Reply(outcome, 9.0, 11.0)], [fault], []) == [f"1 requests ended as {outcome!r}"]


def test_a_fleet_that_does_not_heal_and_a_line_of_error_are_failures() -> None:
    ill = Fault("kill r1", 10.0, missing="r1 is gone")
    assert failures([], [ill], []) == ["the fleet was not whole again after 'kill r1': r1 is gone"]
    (found,) = failures([], [], ["[router] Z error asyncio: Task exception was never retrieved"] * 7)
    assert found.startswith("7 lines of errors were logged: [router] Z error asyncio: Task exception was never")
