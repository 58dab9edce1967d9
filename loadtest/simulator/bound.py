"""A fleet that acts as one machine: one queue for all, and a cache that holds everywhere whatever anyone asked.

Each prefill goes, in order of arrival, to whichever replica is free first, has it to itself, and computes only what was
never computed anywhere before. Decodes cost nothing. No placement that keeps the order of arrival does better.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from loadtest.oracle import IdealHit
from loadtest.records import RequestRecord
from loadtest.simulator.profiles import Profile

__all__ = ["bound_ttft_ms"]


def bound_ttft_ms(
    records: Sequence[RequestRecord], ideals: Sequence[IdealHit | None], profile: Profile, replicas: int
) -> float:
    """The mean, for these arrivals."""
    free_at = [0.0] * replicas
    total = 0.0
    for record, ideal in sorted(zip(records, ideals, strict=True), key=lambda pair: pair[0].scheduled_seconds):
        assert ideal is not None
        begins = max(record.scheduled_seconds, heapq.heappop(free_at))
        done = begins + profile.alone_seconds(ideal.prompt_tokens - ideal.cached_tokens, ideal.prompt_tokens)
        heapq.heappush(free_at, done)
        total += done - record.scheduled_seconds
    return total * 1e3 / max(1, len(records))
