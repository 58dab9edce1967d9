"""What a placement costs others, in seconds: three plain estimates, each of which can be switched off.

decode     While u tokens are prefilled, in steps of about `STEP_TOKENS`, every sequence decoding there takes one token
           of each step: that many tokens of the replica's time go by before the first token.
pressure   Blocks that fit neither in what is free nor in what can be evicted push a running request out, which is
           recomputed later: its tokens' seconds.
eviction   Blocks that fit only by evicting warm ones: those tokens' seconds, times the chance that they were wanted
           again.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        *,
        uncached_tokens: int,
        pending_tokens: int,
        decoding: int,
        block_size: int,
    ) -> float:
        """`pending_tokens` were dispatched there before and take their blocks first. No load known: no pressure."""
        seconds = 0.0
        if self.decode and decoding:
            seconds += cost.per_token_seconds * decoding * (1 + uncached_tokens // STEP_TOKENS)
        if load is not None:
            lacking = pending_tokens + uncached_tokens - load.free_blocks * block_size
            if lacking > 0:
                beyond = max(0, lacking - load.evictable_blocks * block_size)
                # Only this request's own tokens are its doing; what was pending was paid for then.
                if self.pressure:
                    seconds += cost.per_token_seconds * min(beyond, uncached_tokens)
                if self.eviction:
                    evicted = min(lacking - beyond, uncached_tokens)
                    seconds += cost.per_token_seconds * evicted * _EVICTED_WANTED_SHARE
        return seconds
