"""Two of the field's plain rules: least tokens in flight, and the earliest predicted first token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from loadtest.simulator.observer import Observer
from router.placement import Attempt
from router.policies.base import Candidate, Pick, Policy, Request

__all__ = ["LeastTokens", "ShortestTTFT"]


class LeastTokens(Observer):
    """Prompt tokens of all requests there, cached or not: what a router knows that sees no caches."""

    name = "least-tokens"

    def __init__(self) -> None:
        self._tokens: defaultdict[str, int] = defaultdict(int)

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Pick:
        return Pick(min(candidates, key=lambda candidate: self._tokens[candidate.replica_id]), "fewest-tokens")

    def placed(self, request: Request, replica_id: str) -> None:
        self._tokens[replica_id] += request.prompt_tokens

    def finished(self, attempt: Attempt) -> None:
        self._tokens[attempt.replica.id] -= attempt.request.prompt_tokens


class ShortestTTFT(Policy):
    """Our own prediction, without regard for what a placement costs others."""

    name = "shortest-ttft"

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Pick:
        return Pick(min(candidates, key=lambda each: each.wait_seconds + each.service_seconds), "earliest")
