"""A soak passes on a router that is well, and says what leaks on one that is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.soak import soak
from loadtest.soak_verdict import Sample, failures

_MIB = 2**20
_WELL = Sample(resident_bytes=100 * _MIB, descriptors=20, threads=5, in_flight=0, active=0)


async def test_a_short_soak_with_faults_passes() -> None:
    lines: list[str] = []
    assert await soak(15, 3, lines.append) == []
    assert len(lines) == 3
    assert "'200'" in lines[-1]


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        (replace(_WELL, in_flight=1), "the counter in_flight leaks: it is 1"),
        (replace(_WELL, active=2), "the counter active leaks: it is 2"),
        (replace(_WELL, descriptors=53), "descriptors leak: 20 before the load, 53 after it"),
        (replace(_WELL, threads=10), "threads leak: 5 before the load, 10 after it"),
    ],
)
def test_what_is_left_when_nothing_is_under_way_leaks(after: Sample, sentence: str) -> None:
    (found,) = failures(_WELL, [_WELL] * 60, after)
    assert found.startswith(sentence)


def test_memory_may_grow_while_caches_fill_and_no_longer() -> None:
    filling = [replace(_WELL, resident_bytes=min(200, 100 + 4 * second) * _MIB) for second in range(60)]
    leaking = [replace(_WELL, resident_bytes=(100 + 2 * second) * _MIB) for second in range(60)]
    assert failures(_WELL, filling, _WELL) == []
    (found,) = failures(_WELL, leaking, _WELL)
    assert found.startswith("memory grew by 30.0 MiB from the third to the last quarter; at most 24.7 may be")
