"""AIBrix' prefix-cache routing (its gateway's README): longest match, unless it or the fleet is out of balance.

most active - fewest active > 16               fewest active
by falling match, then by fewest active        the first with at most mean + 2 standard deviations active
no match, or all of those are above            fewest active
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from router.policies.base import Candidate, Pick, Policy, Request
from router.policies.hashing import fewest_active, prefix_anchor

__all__ = ["AIBrix"]

_UNBALANCED_REQUESTS = 16
_DEVIATIONS = 2.0


class AIBrix(Policy):
    name = "aibrix"

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Pick:
        active = [candidate.active for candidate in candidates]
        if max(active) - min(active) <= _UNBALANCED_REQUESTS:
            most = fmean(active) + _DEVIATIONS * pstdev(active)
            for candidate in sorted(candidates, key=lambda each: (-each.held_tokens, each.active)):
                if candidate.held_tokens and candidate.active <= most:
                    return Pick(candidate, "longest")
        return Pick(fewest_active(candidates, prefix_anchor(request, 0)), "fewest-active")
