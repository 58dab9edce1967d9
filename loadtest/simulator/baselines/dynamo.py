"""NVIDIA Dynamo's KV router: fewest blocks to prefill and to decode (its routing concepts page, v1.5; temperature 0).

    cost = overlap weight x (blocks of prefill under way there + uncached blocks of this prompt) + active blocks

Active blocks are those of all requests there, shared ones once, this one's included. Weight 1, its default.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from loadtest.simulator.observer import Observer
from router.placement import Attempt
from router.policies.base import Candidate, Pick, Request
from shared.blocks import PublishedKey

__all__ = ["Dynamo"]


class Dynamo(Observer):
    name = "dynamo"

    def __init__(self, overlap_weight: float = 1.0) -> None:
        self._overlap_weight = overlap_weight
        self._active: defaultdict[str, Counter[PublishedKey]] = defaultdict(Counter)

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Pick:
        def cost(candidate: Candidate) -> float:
            uncached = request.prompt_tokens - candidate.held_tokens
            prefill = (self.pending_tokens(candidate.replica_id) + uncached) / request.block_size
            active = self._active[candidate.replica_id]
            decode = len(active) + sum(key not in active for key in request.keys)
            return self._overlap_weight * prefill + decode

        return Pick(min(candidates, key=cost), "cheapest")

    def placed(self, request: Request, replica_id: str) -> None:
        self._active[replica_id].update(request.keys)

    def finished(self, attempt: Attempt) -> None:
        active = self._active[attempt.replica.id]
        for key in attempt.request.keys:
            if active[key] == 1:
                del active[key]
            else:
                active[key] -= 1
