"""The conversation's replica by rendezvous hashing, unless it is too busy (bounded loads: Mirrokni and others, 2016).

No replica takes more than 1.25 times its even share of the active requests, the new one counted; a request whose own
replica is full goes to the next in its order, the same one each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from router.policies.base import Candidate, Pick, Policy, Request
from router.policies.hashing import conversation_anchor, ranked

__all__ = ["ConsistentHash"]

_MOST_OF_EVEN_SHARE = 1.25


class ConsistentHash(Policy):
    name = "consistent-hash"

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Pick:
        total = 1 + sum(candidate.active for candidate in candidates)
        bound = math.ceil(_MOST_OF_EVEN_SHARE * total / len(candidates))
        order = ranked(candidates, conversation_anchor(request))
        chosen = next(candidate for candidate in order if candidate.active < bound)
        return Pick(chosen, "hashed" if chosen is order[0] else "hash-overflow")
