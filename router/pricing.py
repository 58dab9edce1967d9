"""What every candidate would cost, in seconds. Pure: no I/O, and the clock is handed in.

cost_i = wait_i + service_i / (1 - rho) + guard_i
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.cost_model import CostModel, onload_seconds, service_seconds
from router.guards import Guards
from router.ledger import Ledger
from router.policies.base import Candidate, Request
from router.sent_view import SentView
from router.trust import Trust
from shared.blocks import PublishedKey
from shared.fleet_state import CostCoefficients, ReplicaLoad

__all__ = ["APPROXIMATE", "BLIND", "EXACT", "STALE", "Index", "Pricing", "Replica", "View"]

_MAX_RHO = 0.9


class Replica(Protocol):
    """What placement knows of a replica: nothing it would have to ask for."""

    @property
    def id(self) -> str: ...
    @property
    def accepting(self) -> bool: ...
    @property
    def publishes(self) -> bool:
        """Its cache is in the index; if not, only what this router sent it is known."""
        ...

    @property
    def replica_class(self) -> str: ...
    @property
    def load(self) -> ReplicaLoad | None: ...
    @property
    def cost(self) -> CostCoefficients | None: ...
    @property
    def onload_seconds_per_token(self) -> float | None:
        """From host memory, as measured."""
        ...


class Index(Protocol):
    @property
    def tiered(self) -> bool:
        """Replicas hold blocks in host memory too."""
        ...

    def held_prefixes(self, keys: Sequence[PublishedKey]) -> dict[str, int]:
        """Blocks that each replica holds from the first on; those that hold none are absent."""
        ...

    def resident_prefixes(self, keys: Sequence[PublishedKey]) -> dict[str, int]:
        """The same of both tiers together."""
        ...


@dataclass(frozen=True, slots=True)
class View:
    """The rung of the ladder the router stands on, and whether its index still says anything."""

    step: str
    usable: bool


EXACT = View("exact", usable=True)
STALE = View("stale", usable=True)
BLIND = View("hash", usable=False)
APPROXIMATE = View("approximate", usable=True)
"""No replica publishes."""


class Pricing:
    """The same prices for every policy, from what is known of caches, work on the way and what work costs."""

    def __init__(self, index: Index, ledger: Ledger, cost_model: CostModel, trust: Trust, guards: Guards) -> None:
        self._index = index
        self._ledger = ledger
        self._cost_model = cost_model
        self._trust = trust
        self._guards = guards
        self._sent = SentView()
        self._sent_unseen = SentView()
        """To replicas that do publish, since their news stopped coming in: until they tell it themselves."""

    def computed(self, replica: Replica, keys: Sequence[PublishedKey], view_step: str, now: float) -> None:
        """The replica has computed a prompt with this chain, which it may never tell, or not before its news come."""
        if not replica.publishes:
            self._sent.record(replica.id, keys, now)
        elif view_step != EXACT.step:
            self._sent_unseen.record(replica.id, keys, now)

    def retain(self, replica_ids: Collection[str]) -> None:
        """Forget what is kept for replicas that left the fleet."""
        self._sent.retain(replica_ids)
        self._sent_unseen.retain(replica_ids)

    def price(
        self, request: Request, replicas: Sequence[Replica], now: float, view: View, corrections: Mapping[str, int]
    ) -> list[Candidate]:
        """One candidate for each replica, in their order.

        `corrections` are the tokens of this prompt that replicas hold at most, as they said themselves.
        """
        index, ledger, keys = self._index, self._ledger, request.keys
        block_size, prompt_tokens = request.block_size, request.prompt_tokens
        held = index.held_prefixes(keys) if view.usable and keys else {}
        resident = index.resident_prefixes(keys) if view.usable and index.tiered else {}
        unseen = None if view.step == EXACT.step else self._sent_unseen
        if unseen is None:
            self._sent_unseen.clear()
        standings = [ledger.standing(replica.id, now) for replica in replicas]
        mean_filled_tokens = sum([standing.filled_tokens for standing in standings]) / len(replicas)
        rho = min(_MAX_RHO, sum([standing.backlog_share for standing in standings]) / len(replicas))
        scarcity = 1.0 / (1.0 - rho)
        most_cached = max(0, prompt_tokens - 1)  # the last token is always computed
        guard_seconds, trust_of, learned_cost = self._guards.seconds, self._trust.factor, self._cost_model.coefficients
        candidates = []
        # A fleet may be large, and this is done for every request: names are looked up once, fields given by position,
        # and what would be a call for each replica is written out.
        for replica, standing in zip(replicas, standings, strict=True):
            replica_id, publishes = replica.id, replica.publishes
            held_blocks = held.get(replica_id, 0) if publishes else self._sent.depth(replica_id, keys, now)
            if unseen is not None and publishes:
                held_blocks = max(held_blocks, unseen.depth(replica_id, keys, now))
            most_held = min(corrections.get(replica_id, most_cached), most_cached) if corrections else most_cached
            held_tokens = held_blocks * block_size
            if held_tokens > most_held:
                held_tokens = most_held
            matched_tokens = held_tokens
            active = standing.active
            if active:
                matched_tokens = ledger.promised_depth(replica_id, keys, held_blocks) * block_size
                if matched_tokens > most_held:
                    matched_tokens = most_held
            trust = trust_of(replica_id)
            cost = replica.cost or learned_cost(replica.replica_class)
            uncached_tokens = prompt_tokens - int(matched_tokens * trust)
            service = (
                cost.base_seconds
                + cost.per_token_seconds * uncached_tokens
                + cost.per_token_context_seconds * uncached_tokens * prompt_tokens
            )
            host_tokens = 0
            if resident and publishes:
                there = min(resident.get(replica_id, 0) * block_size, most_held) - matched_tokens
                believed = int(there * trust)
                if believed > 0:
                    onload = onload_seconds(cost, replica.onload_seconds_per_token, believed)
                    fetched = service_seconds(cost, uncached_tokens - believed, prompt_tokens) + onload
                    if fetched < service:
                        host_tokens, service, uncached_tokens = there, fetched, uncached_tokens - believed
            guard = guard_seconds(cost, replica.load, standing, uncached_tokens, block_size, mean_filled_tokens)
            wait = standing.wait_seconds
            candidates.append(
                Candidate(
                    replica_id,
                    held_blocks,
                    held_tokens,
                    matched_tokens,
                    trust,
                    wait,
                    service,
                    guard,
                    wait + service * scarcity + guard,
                    active,
                    host_tokens,
                )
            )
        return candidates
