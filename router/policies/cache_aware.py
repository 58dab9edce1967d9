"""The lowest cost in seconds. Near ties: least to compute, fewest active, then a hash.

Least to compute comes first because of a burst with one cold prefix: waiting for it where it is being computed costs
the newcomer no more than computing it again elsewhere, and costs the fleet much less. The hash is that of the session
if the client names one, else of what is not shared anyway: a name decides only where nothing else does.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Candidate, Pick, Policy, Request
from router.policies.hashing import fewest_active, session_anchor

__all__ = ["CacheAware"]

_TIE_SHARE = 0.02
_TIE_SECONDS = 5e-4


class CacheAware(Policy):
    name = "cache-aware"
    reads_view = True

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Pick:
        near = _near(min([candidate.cost_seconds for candidate in candidates]))
        tied = [candidate for candidate in candidates if candidate.cost_seconds <= near]
        chosen = tied[0]
        if len(tied) > 1:
            near = _near(min([candidate.service_seconds for candidate in tied]))
            tied = [candidate for candidate in tied if candidate.service_seconds <= near]
            shared_blocks = min(candidate.held_blocks for candidate in tied)
            chosen = fewest_active(tied, session_anchor(request, shared_blocks))
        return Pick(chosen, self._reason(chosen, candidates))

    @staticmethod
    def _reason(chosen: Candidate, candidates: Sequence[Candidate]) -> str:
        deepest = max([candidate.matched_tokens for candidate in candidates])
        if deepest == 0:
            return "cold"
        if chosen.matched_tokens < deepest:
            return "spread"
        return "promised" if chosen.held_tokens < deepest else "warm"


def _near(seconds: float) -> float:
    return seconds * (1 + _TIE_SHARE) + _TIE_SECONDS
