"""The last requests and what was decided for them, for people who look: no prompts, no tenants, bounded."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

import msgspec

from router.exchange import Exchange

__all__ = ["MOST_RECENT", "Recent", "RecentRequests"]

MOST_RECENT = 100
_LONGEST_NAME = 100


class Recent(msgspec.Struct, frozen=True, gc=False):
    """One request that a replica was chosen for."""

    ended_at: float
    """Seconds since 1970."""
    id: str
    path: str
    model: str
    status: int
    outcome: str
    attempts: int
    replica: str
    policy: str
    reason: str
    view: str
    prompt_tokens: int
    predicted_tokens: int
    cached_tokens: int | None
    first_byte_seconds: float | None
    seconds: float | None


class RecentRequests:
    """The oldest give way."""

    def __init__(self) -> None:
        self._requests: deque[Recent] = deque(maxlen=MOST_RECENT)

    def note(self, exchange: Exchange) -> None:
        decision = exchange.decision
        if decision is None:
            return
        self._requests.append(
            Recent(
                time.time(),
                exchange.request_id,
                exchange.route,
                exchange.model[:_LONGEST_NAME],
                exchange.status,
                exchange.outcome,
                exchange.attempts,
                decision.chosen.replica_id,
                decision.policy,
                decision.reason,
                decision.ladder,
                decision.prompt_tokens,
                decision.predicted_tokens,
                exchange.cached_tokens,
                exchange.first_byte_seconds,
                exchange.seconds,
            )
        )

    def __iter__(self) -> Iterator[Recent]:
        """The oldest first."""
        return iter(self._requests)
