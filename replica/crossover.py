"""Whether bringing KV back from host memory beats computing it again: both as this machine has shown so far.

    seconds   computing  /        computing n tokens behind L others   b*n + c*n*(L + n/2)     from the engine's steps
                      /   __.--   bringing them back                   t*n                     from the transfers
                    /_.--'
    tokens        0 .............

Where the one is not known yet, blocks are brought back: that is how the other gets known. And where it has lost, it is
tried again now and then, since machines change.
"""

from __future__ import annotations

from collections.abc import Callable

from replica.block_moves import Transferred
from shared.fleet_records import CostCoefficients

__all__ = ["Crossover", "WorthOnloading"]

WorthOnloading = Callable[[int, int], bool]
"""(tokens, behind): whether to bring so many tokens' KV back beats computing them behind so many others."""

_LEARNING = 0.1
_TRIED_AGAIN = 32
"""One in so many refusals is brought back nevertheless."""


class Crossover:
    """`cost` tells what prefill costs, or None while that is not known."""

    def __init__(self, block_size: int, cost: Callable[[], CostCoefficients | None]) -> None:
        self._block_size = block_size
        self._cost = cost
        self._seconds_per_token: float | None = None
        self.refused = 0
        """Times that computing was thought to be faster."""

    @property
    def onload_seconds_per_token(self) -> float | None:
        return self._seconds_per_token

    def observe(self, transferred: Transferred) -> None:
        """What a step's moves took."""
        if not transferred.onloaded_blocks:
            return
        seen = transferred.onload_seconds / (transferred.onloaded_blocks * self._block_size)
        known = self._seconds_per_token
        self._seconds_per_token = seen if known is None else known + _LEARNING * (seen - known)

    def worth_onloading(self, tokens: int, behind: int) -> bool:
        """For so many tokens behind so many others."""
        cost, seconds_per_token = self._cost(), self._seconds_per_token
        if cost is None or seconds_per_token is None:
            return True
        # A step's own base is paid for the rest of the prompt in any case.
        computing = tokens * (cost.per_token_seconds + cost.per_token_context_seconds * (behind + tokens / 2))
        if seconds_per_token * tokens < computing:
            return True
        self.refused += 1
        return self.refused % _TRIED_AGAIN == 0
