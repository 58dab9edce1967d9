"""What a placement costs others, in seconds: three plain estimates, each of which can be switched off.

decode     While u tokens are prefilled, in steps of about `STEP_TOKENS`, every sequence decoding there takes one token
           of each step: that many tokens of the replica's time go by before the first token.
pressure   Blocks that fit neither in what is free nor in what can be evicted push a running request out, which is
           recomputed later: its tokens' seconds.
eviction   New content takes the place of what was there, sooner or later: its tokens' seconds, times the chance that
           that was wanted again. A cache that took in twice as much as the others lately has forgotten what is old,
           and would evict what is younger: it counts twice. So new conversations go where the fewest came lately,
           and with them the turns that follow: caches and work stay even without a look at either.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.ledger import Standing
from shared.fleet_state import CostCoefficients, ReplicaLoad

__all__ = ["STEP_TOKENS", "Guards"]

STEP_TOKENS = 512
_EVICTED_WANTED_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Guards:
    """Which of the terms count."""

    decode: bool = True
    pressure: bool = True
    eviction: bool = True

    def seconds(
        self,
        cost: CostCoefficients,
        load: ReplicaLoad | None,
        standing: Standing,
        uncached_tokens: int,
        block_size: int,
        mean_filled_tokens: float,
    ) -> float:
        """`mean_filled_tokens` of all replicas. Pending tokens take their blocks first. No load known: no pressure."""
        tokens = 0.0
        if self.decode and standing.decoding:
            tokens += standing.decoding * (1 + uncached_tokens // STEP_TOKENS)
        if self.eviction and mean_filled_tokens:
            tokens += uncached_tokens * _EVICTED_WANTED_SHARE * standing.filled_tokens / mean_filled_tokens
        if self.pressure and load is not None:
            idle = (load.free_blocks + load.evictable_blocks) * block_size
            beyond = standing.pending_tokens + uncached_tokens - idle
            if beyond > 0:
                # Only this request's own tokens are its doing; what was pending was paid for then.
                tokens += min(beyond, uncached_tokens)
        return cost.per_token_seconds * tokens
