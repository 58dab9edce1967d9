"""Each replica in its turn, in the order of their ids, whatever they hold and however busy they are."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Candidate, Pick, Policy, Request

__all__ = ["RoundRobin"]


class RoundRobin(Policy):
    name = "round-robin"

    def __init__(self) -> None:
        self._last = ""

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Pick:
        # By id rather than by a counter: replicas that come and go do not shift everyone's turn.
        in_order = sorted(candidates, key=lambda candidate: candidate.replica_id)
        after = (candidate for candidate in in_order if candidate.replica_id > self._last)
        return Pick(next(after, in_order[0]), "turn")

    def placed(self, request: Request, replica_id: str) -> None:
        self._last = replica_id
