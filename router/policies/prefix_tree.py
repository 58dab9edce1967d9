"""What was sent where, and thresholds between affinity and balance, as SGLang's router does it (its README, 2024).

The view is approximate: prompts that were sent, by blocks, the oldest forgotten; what engines evict is not known.

    unbalanced (most active > 1.5 x fewest, and by more than 64)      the replica with the fewest active
    else the best match is more than half of the prompt               the replica that was sent it
    else                                                              the replica that was sent the least so far
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Candidate, Pick, Policy, Request
from router.policies.hashing import fewest_active, prefix_anchor
from router.sent_view import SentView

__all__ = ["PrefixTree"]

_MATCH_SHARE = 0.5
_UNBALANCED_REQUESTS = 64
_UNBALANCED_RATIO = 1.5
_FOREVER = 1e18


class PrefixTree(Policy):
    """Remembers `max_blocks` for each replica."""

    name = "prefix-tree"

    def __init__(self, max_blocks: int = 65_536) -> None:
        self._sent = SentView(max_blocks, _FOREVER)

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Pick:
        busiest = max(candidate.active for candidate in candidates)
        idlest = min(candidate.active for candidate in candidates)
        if busiest - idlest > _UNBALANCED_REQUESTS and busiest > _UNBALANCED_RATIO * idlest:
            return Pick(fewest_active(candidates, prefix_anchor(request, 0)), "unbalanced")
        depths = [self._sent.depth(candidate.replica_id, request.keys, 0.0) for candidate in candidates]
        deepest = max(depths)
        if deepest * request.block_size > _MATCH_SHARE * request.prompt_tokens:
            return self._pick(request, candidates, depths, deepest, "sent-before")
        sizes = [self._sent.size(candidate.replica_id) for candidate in candidates]
        return self._pick(request, candidates, sizes, min(sizes), "least-sent")

    @staticmethod
    def _pick(request: Request, candidates: Sequence[Candidate], values: Sequence[int], best: int, reason: str) -> Pick:
        equal = [candidate for candidate, value in zip(candidates, values, strict=True) if value == best]
        return Pick(fewest_active(equal, prefix_anchor(request, 0)), reason)

    def placed(self, request: Request, replica_id: str) -> None:
        self._sent.record(replica_id, request.keys, 0.0)
