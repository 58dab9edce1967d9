"""The replica that holds most of the prompt, however busy it is; the least busy where several hold as much."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Candidate, Pick, Policy, Request
from router.policies.hashing import fewest_active, prefix_anchor

__all__ = ["LongestPrefix"]


class LongestPrefix(Policy):
    name = "longest-prefix"
    reads_view = True

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Pick:
        deepest = max(candidate.matched_tokens for candidate in candidates)
        holders = [candidate for candidate in candidates if candidate.matched_tokens == deepest]
        chosen = fewest_active(holders, prefix_anchor(request, holders[0].held_blocks))
        return Pick(chosen, "longest" if deepest else "cold")
