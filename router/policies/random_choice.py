"""Any replica, all equally likely."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.base import Candidate, Pick, Policy, Request

__all__ = ["RandomChoice"]


class RandomChoice(Policy):
    name = "random"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Pick:
        return Pick(self._rng.choice(candidates), "drawn")
