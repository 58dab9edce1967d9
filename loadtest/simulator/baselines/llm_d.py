"""llm-d's scheduler (its architecture pages and its default profile; the latency-based one from its blog, 2026).

blend    the highest sum of scores: 3 x share of the prompt held + 2 x shortest queue + 2 x free KV, each from 0 to 1
sticky   replicas that hold 80 % of the prompt go before all others, unless the best of them would answer 5 s later;
         among those left the earliest predicted first token; one request in a hundred explores
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from loadtest.simulator.observer import Observer
from router.policies.base import Candidate, Pick, Policy, Request

__all__ = ["LlmdBlend", "LlmdSticky"]

_PREFIX_WEIGHT, _QUEUE_WEIGHT, _KV_WEIGHT = 3.0, 2.0, 2.0
_STICKY_SHARE = 0.8
_STICKY_PENALTY_SECONDS = 5.0
_EXPLORED_SHARE = 0.01


class LlmdBlend(Observer):
    name = "llm-d-blend"

    def __init__(self) -> None:
        self._most_idle_blocks = 1

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Pick:
        loads = [self.replicas[candidate.replica_id].engine.load() for candidate in candidates]
        queues = [load.waiting for load in loads]
        longest, spread = max(queues), max(queues) - min(queues)
        idle = max(load.free_blocks + load.evictable_blocks for load in loads)
        self._most_idle_blocks = max(self._most_idle_blocks, idle)

        def score(place: int) -> float:
            candidate, load = candidates[place], loads[place]
            # Peers of this family count cached blocks as free.
            free = (load.free_blocks + load.evictable_blocks) / self._most_idle_blocks
            return (
                _PREFIX_WEIGHT * candidate.held_tokens / max(1, request.prompt_tokens)
                + _QUEUE_WEIGHT * ((longest - load.waiting) / spread if spread else 1.0)
                + _KV_WEIGHT * free
            )

        return Pick(candidates[max(range(len(candidates)), key=score)], "highest-score")


class LlmdSticky(Policy):
    name = "llm-d-sticky"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Pick:
        def predicted(candidate: Candidate) -> float:
            return candidate.wait_seconds + candidate.service_seconds

        earliest = min(candidates, key=predicted)
        sticky = [c for c in candidates if c.held_tokens >= _STICKY_SHARE * request.prompt_tokens]
        if not sticky or self._rng.random() < _EXPLORED_SHARE:
            return Pick(earliest, "earliest")
        best = min(sticky, key=predicted)
        if predicted(best) > predicted(earliest) + _STICKY_PENALTY_SECONDS:
            return Pick(earliest, "unstuck")
        return Pick(best, "sticky")
