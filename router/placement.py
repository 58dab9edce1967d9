"""Where a request goes, and why. Pure: no I/O, and the clock is handed in.

    cost_i = wait_i + service_i / (1 - rho) + guard_i      seconds; what a policy makes of it is the policy's business

`Placement` prices every candidate the same way for every policy, lets the policy pick, and keeps one set of books: each
attempt is `dispatch`ed before its first byte, sees its `first_token`, and is `finish`ed once, whatever happened. The
fleet simulator runs these same lines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from router.cost_model import CostModel
from router.guards import Guards
from router.ledger import Dispatch, Ledger
from router.policies.base import Candidate, Policy, Request
from router.pricing import APPROXIMATE, BLIND, EXACT, STALE, Index, Pricing, Replica, View
from router.shared_work import Journal
from router.trust import Trust

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
        self._policy = policy
        self._fallback = fallback
        self.ledger = ledger or Ledger()
        self.cost_model = cost_model or CostModel()
        self.trust = Trust()
        self._pricing = Pricing(index, self.ledger, self.cost_model, self.trust, guards or Guards())
        self._journal = journal

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
        candidates = self._pricing.price(request, open_to_it, now, view, corrections or {})
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
        self._pricing.computed(attempt.replica, request.keys, attempt.decision.view, now)

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
        self._pricing.retain(replica_ids)
