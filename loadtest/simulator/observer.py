"""Policies of the simulator alone: they see what a peer's router would see, and keep its books."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from loadtest.simulator.clock import VirtualClock
from router.placement import Attempt, Placement
from router.policies.base import Policy
from shared.fleet_state import ReplicaLoad

__all__ = ["Observer", "Reported"]


class _Engine(Protocol):
    def load(self) -> ReplicaLoad: ...


class Reported(Protocol):
    """A replica as it reports itself."""

    @property
    def engine(self) -> _Engine: ...


class Observer(Policy):
    """Told what becomes of each attempt. Replicas' loads are read as they are this moment, which favours peers."""

    placement: Placement
    replicas: Mapping[str, Reported]
    clock: VirtualClock

    def observe(self, placement: Placement, replicas: Mapping[str, Reported], clock: VirtualClock) -> None:
        self.placement, self.replicas, self.clock = placement, replicas, clock

    def first_token(self, attempt: Attempt) -> None:
        """The prefill is over."""

    def finished(self, attempt: Attempt) -> None:
        """The request has ended, however it did."""

    def pending_tokens(self, replica_id: str) -> int:
        """Uncached tokens of dispatched prefills that have not answered yet."""
        return self.placement.ledger.standing(replica_id, self.clock.now).pending_tokens
