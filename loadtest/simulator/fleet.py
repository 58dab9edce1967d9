"""A fleet under virtual time: conversations arrive, routers decide, replicas compute, caches are published late.

    arrival --> router: Placement.decide, dispatch --> VirtualReplica.submit --> first token --> end --> next turn
                  ^ BlockIndex <-- `publish_seconds` later -- cache events
                  ^ ReplicaLoad, CostCoefficients <-- every `report_seconds`

Everything that decides is the product's own: `Placement` with its ledger, trust and cost model, `BlockIndex`,
`Scheduler` and `PrefixCache`. Traffic is dealt to `routers` in turn; each knows its own dispatches, and those of the
others `share_seconds` later, or never.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import cast

from loadtest.oracle import IdealHit
from loadtest.records import RequestRecord, unsent
from loadtest.simulator.clock import VirtualClock
from loadtest.simulator.observer import Observer
from loadtest.simulator.profiles import PROFILES, Profile
from loadtest.simulator.traces import Conversation
from loadtest.simulator.virtual_replica import Job, VirtualReplica
from replica.prefix_cache import CacheEvents
from replica.scheduler import EngineFull, InvalidPrompt
from replica.sequence import SamplingParams
from replica.sequence import Sequence as EngineSequence
from router.block_index import BlockIndex
from router.placement import EXACT, Attempt, NoReplicaError, Placement
from router.policies.base import Policy, Request
from router.policies.consistent_hash import ConsistentHash
from router.shared_work import Journal, OthersWork
from shared.blocks import BlockKey, block_keys, namespace_root, published_key
from shared.fleet_state import CostCoefficients, ReplicaLoad

__all__ = ["FleetChange", "FleetSetup", "ReplicaView", "Simulation"]

_ROOT = namespace_root("simulated")
_NOTHING_FITS = "the prompt and its answer do not fit a replica's cache"


@dataclass(frozen=True, slots=True)
class FleetChange:
    """At that time a replica `leave`s with all it does, `drain`s (leaves once that is done), or `join`s, cold."""

    seconds: float
    action: str
    replica_id: str


@dataclass(frozen=True, slots=True)
class FleetSetup:
    replicas: int = 8
    profile: Profile = PROFILES["default"]
    blocks: int = 800
    block_size: int = 512
    host_blocks: int = 0
    max_running: int = 256
    routers: int = 1
    publish_seconds: float = 0.025
    """From a change of a cache until the routers see it."""
    share_seconds: float | None = None
    """From a dispatch, first token or end until the other routers know of it; None: they never do."""
    report_seconds: float = 1.0
    """Between two reports of a replica's load."""
    publishes: bool = True
    """If not, replicas are what any OpenAI-compatible server is: routers know what they sent."""
    changes: tuple[FleetChange, ...] = ()
    fast: bool = True


class ReplicaView:
    """What routers know of a replica: `router.placement.Replica`."""

    replica_class = "simulated"

    def __init__(self, engine: VirtualReplica, publishes: bool) -> None:
        self.engine = engine
        self.id = engine.id
        self.accepting = True
        self.publishes = publishes
        self.load: ReplicaLoad | None = None
        self.onload_seconds_per_token: float | None = None
        self.cost: CostCoefficients | None = engine.profile.published if publishes else None

    def report(self) -> None:
        if self.publishes:
            self.load = self.engine.load()
            self.onload_seconds_per_token = self.engine.crossover.onload_seconds_per_token


class _Asked:
    """One turn under way."""

    __slots__ = ("attempt", "conversation", "first_token_at", "number", "placement", "record", "turn")

    def __init__(self, number: int, conversation: Conversation, turn: int, record: int) -> None:
        self.record = record
        self.number = number
        self.conversation = conversation
        self.turn = turn
        self.placement: Placement | None = None
        self.attempt: Attempt | None = None
        self.first_token_at: float | None = None


class Simulation:
    """One run. `records[i]` and `ideals[i]` are one request, in the order of asking."""

    def __init__(
        self,
        setup: FleetSetup,
        make_policy: Callable[[random.Random], Policy],
        conversations: Iterable[Conversation],
        *,
        seed: int = 0,
        make_placement: Callable[[BlockIndex, Policy, Journal | None], Placement] | None = None,
        on_decision: Callable[[Request, Attempt], None] | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.setup = setup
        self.replicas: dict[str, ReplicaView] = {}
        self.records: list[RequestRecord] = []
        self.ideals: list[IdealHit | None] = []
        self.decisions = 0
        self._index = BlockIndex()
        self._conversations = list(conversations)
        self._on_decision = on_decision
        self._ever_held: set[BlockKey] = set()
        self._unfinished = sum(len(each.turns) for each in self._conversations)
        make_placement = make_placement or (
            lambda index, policy, journal: Placement(index, policy, ConsistentHash(), journal=journal)
        )
        self.placements = []
        self._desks: list[tuple[Journal, OthersWork]] = []
        """Of routers that share their work."""
        for router in range(setup.routers):
            policy = make_policy(random.Random(seed * 1009 + router))
            journal = Journal(str(router)) if setup.share_seconds is not None else None
            placement = make_placement(self._index, policy, journal)
            self.placements.append(placement)
            if journal is not None:
                self._desks.append((journal, OthersWork(placement.ledger, self.replicas.__contains__)))
            if isinstance(policy, Observer):
                policy.observe(placement, self.replicas, self.clock)
        self._turns = cycle(self.placements)

    def run(self) -> Simulation:
        for number in range(self.setup.replicas):
            self._join(f"r{number:03d}")
        for change in self.setup.changes:
            act = {"join": self._join, "leave": self._leave, "drain": self._drain}[change.action]
            self.clock.at(change.seconds, act, change.replica_id)
        for number, conversation in enumerate(self._conversations):
            first = conversation.turns[0]
            due = conversation.start_seconds + first.think_seconds
            self.clock.at(due, self._ask, number, conversation, 0, due)
        self.clock.at(0.0, self._report)
        if self._desks:
            self.clock.at(0.0, self._share)
        self.clock.run()
        assert all(placement.ledger.total_active == 0 for placement in self.placements), "a dispatch was never released"
        return self

    # -- the fleet -------------------------------------------------------------------------------------------------

    def _join(self, replica_id: str) -> None:
        setup = self.setup
        engine = VirtualReplica(
            replica_id,
            self.clock,
            setup.profile,
            blocks=setup.blocks,
            block_size=setup.block_size,
            host_blocks=setup.host_blocks,
            max_running=setup.max_running,
            on_events=self._on_events,
            fast=setup.fast,
        )
        self._leave(replica_id)
        self.replicas[replica_id] = ReplicaView(engine, setup.publishes)
        self.replicas[replica_id].report()

    def _leave(self, replica_id: str) -> None:
        view = self.replicas.pop(replica_id, None)
        if view is None:
            return
        self._index.remove(replica_id)
        while self._index.sweep():
            pass
        undone = view.engine.stop()
        for placement in self.placements:
            placement.retain(self.replicas.keys())
        for job in undone:
            self._lost(cast(_EngineJob, job).asked)

    def _drain(self, replica_id: str) -> None:
        if (view := self.replicas.get(replica_id)) is not None:
            view.accepting = False
            self._leave_if_drained(view)

    def _leave_if_drained(self, view: ReplicaView) -> None:
        if not view.accepting and not view.engine.scheduler.has_work and self.replicas.get(view.id) is view:
            self._leave(view.id)

    def _on_events(self, replica_id: str, events: CacheEvents) -> None:
        self.clock.at(self.clock.now + self.setup.publish_seconds, self._publish, self.replicas[replica_id], events)

    def _publish(self, view: ReplicaView, events: CacheEvents) -> None:
        if view.publishes and self.replicas.get(view.id) is view:
            self._index.apply(view.id, *(map(published_key, keys) for keys in events))

    def _report(self) -> None:
        for view in self.replicas.values():
            view.report()
        if self._unfinished:
            self.clock.at(self.clock.now + self.setup.report_seconds, self._report)

    def _share(self) -> None:
        """Once in that time, so news are half as old on average, as in routers: one round trip reads and writes."""
        for journal, _ in self._desks:
            batch = journal.take()
            for other, others in self._desks:
                if other is not journal:
                    others.apply(batch, self.clock.now)
        if self._unfinished:
            assert self.setup.share_seconds is not None
            self.clock.at(self.clock.now + self.setup.share_seconds, self._share)

    # -- a request -------------------------------------------------------------------------------------------------

    def _ask(self, number: int, conversation: Conversation, turn: int, due: float) -> None:
        asked = _Asked(number, conversation, turn, len(self.records))
        self.records.append(unsent(number, turn, due, "still under way"))
        tokens = conversation.turns[turn].prompt.token_ids()
        keys = block_keys(_ROOT, cast(Sequence[int], tokens), self.setup.block_size)
        self.ideals.append(self._ideal(keys, len(tokens)))
        self._send(asked, cast("list[int]", tokens), keys)

    def _send(self, asked: _Asked, tokens: list[int], keys: list[BlockKey]) -> None:
        now = self.clock.now
        published = [published_key(key) for key in keys]
        request = Request(
            prompt_tokens=len(tokens),
            keys=published,
            block_size=self.setup.block_size,
            affinity=keys[0] if keys else asked.number.to_bytes(8, "little"),
        )
        placement = asked.placement = next(self._turns)
        try:
            decision = placement.decide(request, self.replicas.values(), now, view=EXACT)
        except NoReplicaError:
            self._fail(asked, "no replica")
            return
        self.decisions += 1
        view = self.replicas[decision.chosen.replica_id]
        asked.attempt = placement.dispatch(request, view, decision, now)
        if self._on_decision is not None:
            self._on_decision(request, asked.attempt)
        turn = asked.conversation.turns[asked.turn]
        sequence = EngineSequence(
            request_id=str(asked.record),
            tokens=tokens,
            prompt_tokens=len(tokens),
            params=SamplingParams(max_tokens=turn.output_tokens, temperature=0.0, ignore_eos=True),
            root=_ROOT,
            keys=keys,
        )
        try:
            view.engine.submit(_EngineJob(sequence, self._first_token, self._finished, asked))
        except (EngineFull, InvalidPrompt) as refusal:
            self._release(asked)
            self._fail(asked, _NOTHING_FITS if isinstance(refusal, InvalidPrompt) else "replicas are full")

    def _first_token(self, job: Job) -> None:
        asked = cast(_EngineJob, job).asked
        assert asked.placement is not None
        assert asked.attempt is not None
        asked.first_token_at = self.clock.now
        asked.placement.first_token(asked.attempt, self.clock.now, job.sequence.cached_tokens)
        policy = asked.placement.policy
        if isinstance(policy, Observer):
            policy.first_token(asked.attempt)

    def _finished(self, job: Job) -> None:
        asked, sequence, now = cast(_EngineJob, job).asked, job.sequence, self.clock.now
        assert asked.attempt is not None
        assert asked.first_token_at is not None
        chosen = asked.attempt.decision.chosen
        self._release(asked)
        self._ever_held.update(sequence.keys)
        scheduled = self.records[asked.record].scheduled_seconds
        output = sequence.output_tokens
        self.records[asked.record] = RequestRecord(
            session=asked.number,
            turn=asked.turn,
            scheduled_seconds=scheduled,
            sent_seconds=scheduled,
            lag_ms=0.0,
            status=200,
            ttft_ms=(asked.first_token_at - scheduled) * 1e3,
            e2e_ms=(now - scheduled) * 1e3,
            tpot_ms=(now - asked.first_token_at) * 1e3 / (output - 1) if output > 1 else None,
            prompt_tokens=sequence.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
            completion_tokens=output,
            predicted_tokens=chosen.predicted_tokens,
            replica=chosen.replica_id,
        )
        self._unfinished -= 1
        view = self.replicas[chosen.replica_id]
        if not view.accepting:
            self.clock.at(now, self._leave_if_drained, view)
        following = asked.turn + 1
        if following < len(asked.conversation.turns):
            turn = asked.conversation.turns[following]
            due = now + turn.think_seconds if turn.due_seconds is None else turn.due_seconds
            self.clock.at(due, self._ask, asked.number, asked.conversation, following, due)

    def _lost(self, asked: _Asked) -> None:
        """Its replica went away: sent again if nothing was answered yet, as the proxy does."""
        self._release(asked)
        if asked.first_token_at is not None:
            self._fail(asked, "the replica left in the middle of the answer")
            return
        tokens = asked.conversation.turns[asked.turn].prompt.token_ids()
        keys = block_keys(_ROOT, cast(Sequence[int], tokens), self.setup.block_size)
        self._send(asked, cast("list[int]", tokens), keys)

    def _release(self, asked: _Asked) -> None:
        assert asked.placement is not None
        assert asked.attempt is not None
        asked.placement.finish(asked.attempt, self.clock.now)
        policy = asked.placement.policy
        if isinstance(policy, Observer):
            policy.finished(asked.attempt)

    def _fail(self, asked: _Asked, why: str) -> None:
        """What would have followed in the conversation is not asked."""
        record = self.records[asked.record]
        self.records[asked.record] = unsent(record.session, record.turn, record.scheduled_seconds, why)
        self._unfinished -= len(asked.conversation.turns) - asked.turn

    def _ideal(self, keys: list[BlockKey], prompt_tokens: int) -> IdealHit:
        """Of one endless cache, as `loadtest.oracle` counts it."""
        usable = (prompt_tokens - 1) // self.setup.block_size
        depth = next((n for n, key in enumerate(keys[:usable]) if key not in self._ever_held), min(usable, len(keys)))
        self._ever_held.update(keys)
        return IdealHit(prompt_tokens, depth * self.setup.block_size)


class _EngineJob(Job):
    __slots__ = ("asked",)

    def __init__(
        self,
        sequence: EngineSequence,
        first_token: Callable[[Job], None],
        finished: Callable[[Job], None],
        asked: _Asked,
    ) -> None:
        super().__init__(sequence, first_token, finished)
        self.asked = asked
