"""Fewest requests active, whatever the replicas hold; ties by content, so that equal prompts at least tend together."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Candidate, Pick, Policy, Request
from router.policies.hashing import conversation_anchor, fewest_active

__all__ = ["LeastLoaded"]


class LeastLoaded(Policy):
    name = "least-loaded"

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Pick:
        return Pick(fewest_active(candidates, conversation_anchor(request)), "fewest-active")
