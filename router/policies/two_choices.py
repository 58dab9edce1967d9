"""The less busy of two drawn at random (Mitzenmacher's power of two choices)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.base import Candidate, Pick, Policy, Request

__all__ = ["TwoChoices"]


class TwoChoices(Policy):
    name = "two-choices"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Pick:
        drawn = self._rng.sample(candidates, min(2, len(candidates)))
        return Pick(min(drawn, key=lambda candidate: candidate.active), "less-busy-of-two")
