"""What a soak has measured of a router, and what of it is a leak. Pure: samples in, sentences out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Sample", "failures"]

_MIB = 2**20
_GROWTH_BYTES = 16 * _MIB
_GROWTH_SHARE = 0.05
_MORE_DESCRIPTORS = 32
"""Connections to replicas that are kept for the next request."""
_MORE_THREADS = 4


@dataclass(frozen=True, slots=True)
class Sample:
    resident_bytes: int
    descriptors: int
    threads: int
    in_flight: float
    active: float
    """Of all replicas together."""


def failures(idle_before: Sample, under_load: Sequence[Sample], idle_after: Sample) -> list[str]:
    """One sentence for each thing that leaks. Memory is judged after the first half, in which caches fill."""
    found = []
    later = under_load[len(under_load) // 2 :]
    if len(later) >= 4:
        third, last = later[: len(later) // 2], later[len(later) // 2 :]
        before, after = (statistics.median(each.resident_bytes for each in part) for part in (third, last))
        allowed = _GROWTH_BYTES + _GROWTH_SHARE * before
        if after - before > allowed:
            grown, most = (after - before) / _MIB, allowed / _MIB
            found.append(
                f"memory grew by {grown:.1f} MiB from the third to the last quarter; at most {most:.1f} may be"
            )
    for what, more in (("descriptors", _MORE_DESCRIPTORS), ("threads", _MORE_THREADS)):
        before, after = getattr(idle_before, what), getattr(idle_after, what)
        if after > before + more:
            found.append(f"{what} leak: {before} before the load, {after} after it; at most {more} more may be")
    counters = {"in_flight": idle_after.in_flight, "active": idle_after.active}
    return found + [
        f"the counter {name} leaks: it is {count:g} though nothing is under way"
        for name, count in counters.items()
        if count
    ]
