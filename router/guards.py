"""What a placement costs others, in seconds: three plain estimates, each of which can be switched off.

decode     While u tokens are prefilled, in steps of about `STEP_TOKENS`, every sequence decoding there takes one token
           of each step: that many tokens of the replica's time go by before the first token.
pressure   Blocks that fit neither in what is free nor in what can be evicted push a running request out, which is
           recomputed later: its tokens' seconds.
eviction   Blocks that fit only by evicting warm ones: those tokens' seconds, times the chance that they were wanted
           again. A cache that took in twice as much as the others lately has forgotten what is old: what it would
           evict now is younger, and counts twice.
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
        if load is not None:
            lacking = standing.pending_tokens + uncached_tokens - load.free_blocks * block_size
            if lacking > 0:
                evictable = load.evictable_blocks * block_size
                beyond = lacking - evictable if lacking > evictable else 0
                # Only this request's own tokens are its doing; what was pending was paid for then.
                if self.pressure and beyond:
                    tokens += min(beyond, uncached_tokens)
                if self.eviction:
                    evicted = min(lacking - beyond, uncached_tokens) * _EVICTED_WANTED_SHARE
                    if mean_filled_tokens:
                        evicted *= standing.filled_tokens / mean_filled_tokens
                    tokens += evicted
        return cost.per_token_seconds * tokens
