"""What a soak has seen, and what of it is a failure. Pure: what was seen in, sentences out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Fault", "Reply", "Sample", "failures", "leaks"]

_MIB = 2**20
_GROWTH_BYTES = 16 * _MIB
_GROWTH_SHARE = 0.05
_MORE_DESCRIPTORS = 32
"""Connections to replicas that are kept for the next request."""
_MORE_THREADS = 4
_MORE_TASKS = 2
_EXCUSED = ("429", "502", "503", "504", "told", "cut")
"""How requests may end while a fault lasts: refused, or broken off and told so as far as the protocol allows."""
_SHOWN = 5
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Sample:
    resident_bytes: int
    descriptors: int
    threads: int
    tasks: float
    in_flight: float
    active: float
    """Of all replicas together."""


@dataclass(frozen=True, slots=True)
class Reply:
    """How a request ended that has no whole answer: a status, `told` in its stream that it was broken off, `cut`
    without a word, `late`, or `incomplete`.
    """

    outcome: str
    began: float
    ended: float


@dataclass(slots=True)
class Fault:
    """From when it was done until the fleet was whole again: all replicas taken, no breaker open, the view exact."""

    name: str
    began: float
    ended: float = float("inf")
    missing: str = ""
    """What was not whole when patience ended."""

    def met(self, reply: Reply) -> bool:
        return reply.began <= self.ended and reply.ended >= self.began


def failures(replies: Sequence[Reply], faults: Sequence[Fault], logged: Sequence[str]) -> list[str]:
    """One sentence for each kind of thing that should not have been. `logged` are errors of the programs."""
    found: dict[str, int] = {}
    for reply in replies:
        if reply.outcome not in _EXCUSED:
            sentence = f"ended as {reply.outcome!r}"
        elif not any(fault.met(reply) for fault in faults):
            sentence = f"ended as {reply.outcome!r} though no fault was on"
        else:
            continue
        found[sentence] = found.get(sentence, 0) + 1
    sentences = [f"{count} requests {sentence}" for sentence, count in found.items()]
    unhealed = [fault for fault in faults if fault.ended == float("inf")]
    sentences += [f"the fleet was not whole again after {fault.name!r}: {fault.missing}" for fault in unhealed]
    if logged:
        shown = " | ".join(line[:_SHOWN_CHARACTERS] for line in logged[:_SHOWN])
        sentences.append(f"{len(logged)} lines of errors were logged: {shown}")
    return sentences


def leaks(idle_before: Sample, under_load: Sequence[Sample], idle_after: Sample) -> list[str]:
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
    for what, more in (("descriptors", _MORE_DESCRIPTORS), ("threads", _MORE_THREADS), ("tasks", _MORE_TASKS)):
        before, after = getattr(idle_before, what), getattr(idle_after, what)
        if after > before + more:
            found.append(f"{what} leak: {before:g} before the load, {after:g} after it; at most {more} more may be")
    counters = {"in_flight": idle_after.in_flight, "active": idle_after.active}
    return found + [
        f"the counter {name} leaks: it is {count:g} though nothing is under way"
        for name, count in counters.items()
        if count
    ]
