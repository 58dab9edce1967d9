"""The last ten minutes of the router in ticks of two seconds: what happened in each, so that workers' ticks add up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from router.admission import Admission
from router.metrics import RouterMetrics

__all__ = ["TICK_SECONDS", "History", "Sample", "add_up"]

TICK_SECONDS = 2
_MOST_SAMPLES = 300
_REFUSED, _FAILED = 429, 500


class Sample(msgspec.Struct, array_like=True, gc=False):
    """One tick. Tokens are of answers whose engine told how many it held."""

    tick: int
    """Seconds since 1970 over `TICK_SECONDS`, at its beginning."""
    requests: int
    unserved: int
    """Refused for want of room, or failed."""
    queried_tokens: int
    predicted_tokens: int
    hit_tokens: int
    in_flight: int
    queued: int
    first_token: list[int]
    """Streamed answers that began, by bucket of their time to first token."""


class _Totals(NamedTuple):
    requests: int = 0
    unserved: int = 0
    queried_tokens: int = 0
    predicted_tokens: int = 0
    hit_tokens: int = 0


class History:
    """`note` is called once a tick."""

    def __init__(self, metrics: RouterMetrics, admission: Admission) -> None:
        self._metrics = metrics
        self._admission = admission
        self._samples: deque[Sample] = deque(maxlen=_MOST_SAMPLES)
        self._last = _totals(metrics)
        self._last_first_token = list(metrics.first_token.counts)

    def note(self, tick: int) -> None:
        """`tick` is over."""
        totals, first_token = _totals(self._metrics), list(self._metrics.first_token.counts)
        # Replicas that leave take their counts along.
        rise = _Totals(*(max(0, new - old) for new, old in zip(totals, self._last, strict=True)))
        began = [new - old for new, old in zip(first_token, self._last_first_token, strict=True)]
        queued = self._admission.queued
        self._samples.append(
            Sample(
                tick,
                rise.requests,
                rise.unserved,
                rise.queried_tokens,
                rise.predicted_tokens,
                rise.hit_tokens,
                self._admission.in_flight,
                queued,
                began,
            )
        )
        self._last, self._last_first_token = totals, first_token

    def after(self, tick: int) -> list[Sample]:
        return [sample for sample in self._samples if sample.tick > tick]


def add_up(histories: Iterable[Sequence[Sample]], until: int) -> list[Sample]:
    """One history of several workers', without ticks that somebody may not have noted yet."""
    sums: dict[int, Sample] = {}
    for sample in (sample for samples in histories for sample in samples if sample.tick < until):
        known = sums.get(sample.tick)
        sums[sample.tick] = sample if known is None else _sum(known, sample)
    return [sums[tick] for tick in sorted(sums)]


def _sum(one: Sample, other: Sample) -> Sample:
    return Sample(
        one.tick,
        one.requests + other.requests,
        one.unserved + other.unserved,
        one.queried_tokens + other.queried_tokens,
        one.predicted_tokens + other.predicted_tokens,
        one.hit_tokens + other.hit_tokens,
        one.in_flight + other.in_flight,
        one.queued + other.queued,
        [a + b for a, b in zip(one.first_token, other.first_token, strict=True)],
    )


def _totals(metrics: RouterMetrics) -> _Totals:
    replicas = metrics.replicas.values()
    return _Totals(
        sum(metrics.requests.values()),
        sum(count for (_, outcome, status), count in metrics.requests.items() if _unserved(outcome, status)),
        sum(counts.queried_tokens for counts in replicas),
        sum(counts.predicted_tokens for counts in replicas),
        sum(counts.hit_tokens for counts in replicas),
    )


def _unserved(outcome: str, status: int) -> bool:
    return status == _REFUSED or status >= _FAILED or outcome == "replica_broke_off"
