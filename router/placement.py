"""Where a request goes, and why. Pure: no I/O, and the clock is handed in.

    cost_i = wait_i + service_i / (1 - rho) + guard_i      seconds; what a policy makes of it is the policy's business

`Placement` prices every candidate the same way for every policy, lets the policy pick, and keeps one set of books: each
attempt is `dispatch`ed before its first byte, sees its `first_token`, and is `finish`ed once, whatever happened. The
fleet simulator runs these same lines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from router.cost_model import CostModel, onload_seconds, service_seconds
from router.guards import Guards
from router.ledger import Dispatch, Ledger
from router.policies.base import Candidate, Policy, Request
from router.sent_view import SentView
from router.shared_work import Journal
from router.trust import Trust
from shared.blocks import PublishedKey
from shared.fleet_state import CostCoefficients, ReplicaLoad

__all__ = [
    "APPROXIMATE",
    "BLIND",
    "EXACT",
    "STALE",
    "Attempt",
    "Decision",
    "NoReplicaError",
    "Placement",
    "Replica",
    "View",
]

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


class NoReplicaError(Exception):
    """Nobody can take the request: all are draining, gone or excluded."""


class Decision(msgspec.Struct, frozen=True, gc=False):
    """The choice, every candidate it was made from, and the reason."""

    policy: str
    view: str
    reason: str
    chosen: Candidate
    candidates: list[Candidate]
    prompt_tokens: int
    doubted: bool = False
    """The chosen replica is believed to hold less than it publishes of this prompt."""

    @property
    def ladder(self) -> str:
        """The view, or that the choice was made from it with a doubt: its match counted for less than it published."""
        return "discounted" if self.doubted and self.view == EXACT.step else self.view

    @property
    def predicted_tokens(self) -> int:
        return self.chosen.predicted_tokens

    @property
    def sentence(self) -> str:
        """The choice in words, for people."""
        chosen = self.chosen
        promised = " (partly promised by requests on the way)" if chosen.matched_tokens > chosen.held_tokens else ""
        in_host_memory = f" and {chosen.host_tokens} in its host memory" if chosen.host_tokens else ""
        doubt = f", of which {chosen.trust:.0%} are believed" if self.doubted else ""
        words = (
            f"{chosen.replica_id} by {self.policy} ({self.reason}): {chosen.matched_tokens} of {self.prompt_tokens} "
            f"prompt tokens cached there{promised}{in_host_memory}{doubt}; wait {chosen.wait_seconds:.3f} s "
            f"+ prefill {chosen.service_seconds:.3f} s + guard {chosen.guard_seconds:.3f} s, "
            f"cost {chosen.cost_seconds:.3f} s, {chosen.active} active"
        )
        others = [candidate for candidate in self.candidates if candidate is not chosen]
        if not others:
            return f"{words}; no other replica could take it"
        rival = min(others, key=lambda candidate: candidate.cost_seconds)
        return (
            f"{words}; the best other is {rival.replica_id} at {rival.cost_seconds:.3f} s "
            f"with {rival.matched_tokens} tokens cached, {rival.active} active"
        )


class Attempt:
    """One dispatch of a decided request: what `first_token` and `finish` need to settle the books."""

    __slots__ = ("cached_tokens", "decision", "dispatch", "replica", "request")

    def __init__(self, request: Request, replica: Replica, decision: Decision, dispatch: Dispatch) -> None:
        self.request = request
        self.replica = replica
        self.decision = decision
        self.dispatch = dispatch
        self.cached_tokens: int | None = None


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


class Placement:
    """Prices candidates, asks the policy, keeps the books."""

    def __init__(
        self,
        index: Index,
        policy: Policy,
        fallback: Policy,
        *,
        ledger: Ledger | None = None,
        cost_model: CostModel | None = None,
        guards: Guards | None = None,
        journal: Journal | None = None,
    ) -> None:
        """`fallback` decides while `policy` reads the view of the cache and there is none worth reading.

        `journal` is told of every attempt, for the other routers.
        """
        self._index = index
        self._policy = policy
        self._fallback = fallback
        self.ledger = ledger or Ledger()
        self.cost_model = cost_model or CostModel()
        self.trust = Trust()
        self._guards = guards or Guards()
        self._journal = journal
        self._sent = SentView()
        self._sent_unseen = SentView()
        """To replicas that do publish, since their news stopped coming in: until they tell it themselves."""

    @property
    def policy(self) -> Policy:
        return self._policy

    def decide(
        self,
        request: Request,
        replicas: Iterable[Replica],
        now: float,
        *,
        excluded: Collection[str] = (),
        view: View = EXACT,
        policy: Policy | None = None,
        corrections: Mapping[str, int] | None = None,
    ) -> Decision:
        """Choose among the replicas that accept work and are not excluded; by `policy` if not by the usual one.

        `corrections` are the tokens of this prompt that replicas hold at most, as they said themselves.
        Raises NoReplicaError when none is left.
        """
        open_to_it = [replica for replica in replicas if replica.accepting and replica.id not in excluded]
        if not open_to_it:
            raise NoReplicaError
        candidates = self._price(request, open_to_it, now, view, corrections or {})
        policy = policy or self._policy
        if policy.reads_view and not view.usable:
            policy = self._fallback
        pick = policy.choose(request, candidates)
        chosen = pick.candidate
        doubted = chosen.held_tokens > 0 and self.trust.doubted(chosen.replica_id)
        return Decision(policy.name, view.step, pick.reason, chosen, candidates, request.prompt_tokens, doubted)

    def dispatch(self, request: Request, replica: Replica, decision: Decision, now: float) -> Attempt:
        """Count the chosen attempt in. Call it without an await after `decide`, before the first byte leaves."""
        chosen = decision.chosen
        dispatch = self.ledger.dispatch(
            chosen.replica_id,
            now,
            service_seconds=chosen.service_seconds,
            uncached_tokens=request.prompt_tokens - decision.predicted_tokens,
            promised=request.keys[chosen.held_blocks :],
            streamed=request.streamed,
        )
        if self._journal is not None:
            self._journal.dispatched(dispatch)
        if decision.policy == self._policy.name:
            self._policy.placed(request, chosen.replica_id)
        return Attempt(request, replica, decision, dispatch)

    def first_token(self, attempt: Attempt, now: float, cached_tokens: int | None = None) -> None:
        """The replica has answered; `cached_tokens` as its engine counted them, None when it does not say."""
        if attempt.dispatch.first_token_seen:
            return
        request, chosen = attempt.request, attempt.decision.chosen
        served_seconds = self.ledger.first_token(attempt.dispatch, now)
        if self._journal is not None:
            self._journal.first_token(attempt.dispatch)
        attempt.cached_tokens = cached_tokens
        if cached_tokens is not None:
            self.trust.observe(chosen.replica_id, chosen.held_tokens, cached_tokens, request.block_size)
        if served_seconds is not None and request.streamed:
            cached = (
                attempt.decision.predicted_tokens
                if cached_tokens is None
                else min(cached_tokens, request.prompt_tokens - 1)
            )
            uncached = max(1, request.prompt_tokens - cached)
            self.cost_model.observe(attempt.replica.replica_class, uncached, request.prompt_tokens, served_seconds)
        if not attempt.replica.publishes:
            self._sent.record(chosen.replica_id, request.keys, now)
        elif attempt.decision.view != EXACT.step:
            self._sent_unseen.record(chosen.replica_id, request.keys, now)

    def colder(self, attempt: Attempt, cached_tokens: int) -> None:
        """The replica took nothing on, since it holds so much less than it was expected to: believe it less."""
        chosen = attempt.decision.chosen
        self.trust.observe(chosen.replica_id, chosen.held_tokens, cached_tokens, attempt.request.block_size)

    def finish(self, attempt: Attempt, now: float) -> None:
        """The attempt is over, served or not: everything counted for it is released, its promises are dropped."""
        self.ledger.release(attempt.dispatch, now)
        if self._journal is not None:
            self._journal.ended(attempt.dispatch)

    def retain(self, replica_ids: Collection[str]) -> None:
        """Forget what is kept for replicas that left the fleet; requests under way there stay counted."""
        self.ledger.retain(replica_ids)
        self.trust.retain(replica_ids)
        self._sent.retain(replica_ids)
        self._sent_unseen.retain(replica_ids)

    def _price(
        self,
        request: Request,
        replicas: Sequence[Replica],
        now: float,
        view: View,
        corrections: Mapping[str, int],
    ) -> list[Candidate]:
        ledger, keys, block_size, prompt_tokens = self.ledger, request.keys, request.block_size, request.prompt_tokens
        index = self._index
        held = index.held_prefixes(keys) if view.usable and keys else {}
        resident = index.resident_prefixes(keys) if view.usable and index.tiered else {}
        standings = [ledger.standing(replica.id, now) for replica in replicas]
        mean_filled_tokens = sum([standing.filled_tokens for standing in standings]) / len(replicas)
        rho = min(_MAX_RHO, sum([standing.backlog_share for standing in standings]) / len(replicas))
        scarcity = 1.0 / (1.0 - rho)
        # The last token of a prompt is always computed.
        most_cached = max(0, prompt_tokens - 1)
        guard_seconds, trust_of, coefficients = self._guards.seconds, self.trust.factor, self.cost_model.coefficients
        exact = view.step == EXACT.step
        if exact:
            self._sent_unseen.clear()
        candidates = []
        # A fleet may be large, and this is done for every request: names are looked up once, fields given by position.
        for replica, standing in zip(replicas, standings, strict=True):
            replica_id = replica.id
            publishes = replica.publishes
            held_blocks = held.get(replica_id, 0) if publishes else self._sent.depth(replica_id, keys, now)
            if not exact and publishes:
                held_blocks = max(held_blocks, self._sent_unseen.depth(replica_id, keys, now))
            most_held = min(corrections.get(replica_id, most_cached), most_cached) if corrections else most_cached
            matched_tokens = held_tokens = min(held_blocks * block_size, most_held)
            if standing.active:
                matched_blocks = ledger.promised_depth(replica_id, keys, held_blocks)
                matched_tokens = min(matched_blocks * block_size, most_held)
            trust = trust_of(replica_id)
            uncached_tokens = prompt_tokens - int(matched_tokens * trust)
            cost = coefficients(replica.replica_class, replica.cost)
            service = service_seconds(cost, uncached_tokens, prompt_tokens)
            host_tokens = 0
            if publishes and resident:
                there = min(resident.get(replica_id, 0) * block_size, most_held) - matched_tokens
                if there > 0:
                    computed_tokens = uncached_tokens - int(there * trust)
                    fetched = service_seconds(cost, computed_tokens, prompt_tokens)
                    fetched += onload_seconds(cost, replica.onload_seconds_per_token, int(there * trust))
                    if fetched < service:
                        host_tokens, service, uncached_tokens = there, fetched, computed_tokens
            guard = guard_seconds(cost, replica.load, standing, uncached_tokens, block_size, mean_filled_tokens)
            wait = standing.wait_seconds
            total = wait + service * scarcity + guard
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
                    total,
                    standing.active,
                    host_tokens,
                )
            )
        return candidates
