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
    """The oldest give way. What is to be shown of one is looked up when somebody looks."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, Exchange]] = deque(maxlen=MOST_RECENT)

    def note(self, exchange: Exchange) -> None:
        """It has ended, and will not be changed any more."""
        if exchange.decision is not None:
            if len(exchange.model) > _LONGEST_NAME:  # whatever a client called it is not to be kept
                exchange.model = exchange.model[:_LONGEST_NAME]
            self._ended.append((time.time(), exchange))

    def __iter__(self) -> Iterator[Recent]:
        """The oldest first."""
        return (_recent(ended_at, exchange) for ended_at, exchange in self._ended)


def _recent(ended_at: float, exchange: Exchange) -> Recent:
    decision = exchange.decision
    assert decision is not None
    return Recent(
        ended_at=ended_at,
        id=exchange.request_id,
        path=exchange.route,
        model=exchange.model,
        status=exchange.status,
        outcome=exchange.outcome,
        attempts=exchange.attempts,
        replica=decision.chosen.replica_id,
        policy=decision.policy,
        reason=decision.reason,
        view=decision.ladder,
        prompt_tokens=decision.prompt_tokens,
        predicted_tokens=decision.predicted_tokens,
        cached_tokens=exchange.cached_tokens,
        first_byte_seconds=exchange.first_byte_seconds,
        seconds=exchange.seconds,
    )
