"""LMetric (Zhang and others, 2026): the lowest product of tokens to prefill and requests there, with this one."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.simulator.observer import Observer
from router.policies.base import Candidate, Pick, Request

__all__ = ["LMetric"]


class LMetric(Observer):
    name = "lmetric"

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Pick:
        def product(candidate: Candidate) -> float:
            tokens = self.pending_tokens(candidate.replica_id) + request.prompt_tokens - candidate.held_tokens
            return tokens * (candidate.active + 1)

        return Pick(min(candidates, key=product), "lowest-product")
