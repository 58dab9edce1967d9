"""A histogram of seconds that costs an addition or three, and no lock: it belongs to one event loop."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

__all__ = ["Histogram"]


class Histogram:
    """`counts[i]` values were at most `bounds[i]` and above the bound before; the last count has no upper bound."""

    __slots__ = ("bounds", "counts", "sum_seconds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum_seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_seconds += seconds

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """As Prometheus has it: each bucket counts those below it too."""
        limits = [*map(floatToGoString, self.bounds), "+Inf"]
        buckets = list(zip(limits, map(float, accumulate(self.counts)), strict=True))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self.sum_seconds)
