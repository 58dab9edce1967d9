"""The simulator held against live runs: the same prompts, answers and arrivals, same costs, and how far it is off."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from loadtest.cluster import Cluster
from loadtest.plans import AnyPlan, replica_settings, simulated_profile
from loadtest.records import RequestRecord
from loadtest.results import Distribution, Run, Simulated
from loadtest.simulator.baselines import SIMULATED_POLICIES
from loadtest.simulator.fleet import FleetSetup, Simulation
from loadtest.simulator.traces import ANSWER_TOKEN, Conversation, ListedPrompt, Turn
from loadtest.workloads import Session
from shared.settings import CompareSettings

__all__ = ["conversations_of", "simulated_errors"]


def simulated_errors(
    plan: AnyPlan, runs: Mapping[str, Sequence[Run]], cluster: Cluster, settings: CompareSettings
) -> dict[str, Simulated]:
    """By policy, over all repeats that are not void; peers' routers are not simulated."""
    replica = replica_settings(settings)
    setup = FleetSetup(
        replicas=settings.replicas,
        profile=simulated_profile(replica, cluster.capacity_blocks * cluster.block_size),
        blocks=cluster.capacity_blocks,
        block_size=cluster.block_size,
        max_running=replica.max_running,
    )
    found = {}
    for policy, each in runs.items():
        valid = [run for run in each if run.result.void is None]
        if policy in SIMULATED_POLICIES and valid:
            found[policy] = _error(policy, plan, valid, cluster, setup)
    return found


def conversations_of(
    sessions: Sequence[Session], records: Sequence[RequestRecord], cluster: Cluster
) -> list[Conversation]:
    """What was asked in a live run, with the answers it got told as the simulated engine would give them."""
    answers: defaultdict[int, list[RequestRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.turn):
        if record.error is None:
            answers[record.session].append(record)
    return [
        Conversation(session.turns[0].at_seconds, tuple(_turns(session, answers[session.id], cluster)))
        for session in sessions
        if answers[session.id]
    ]


def _turns(session: Session, answered: Sequence[RequestRecord], cluster: Cluster) -> list[Turn]:
    said: list[str] = []
    spans: list[slice] = []
    turns: list[Turn] = []
    for turn, record in zip(session.turns, answered, strict=False):
        ids = array("I", cluster.encode_prompt(session.messages(said)))
        if not session.standalone:
            for span in spans:
                ids[span] = array("I", [ANSWER_TOKEN]) * (span.stop - span.start)
        closed = turn.think_seconds is not None
        think = turn.think_seconds if turn.think_seconds is not None and turns else 0.0
        due = None if closed or not turns else turn.at_seconds
        turns.append(Turn(ListedPrompt(ids), record.completion_tokens, think, due))
        spans.append(slice(len(ids), len(ids) + len(cluster.encode_answer(record.answer))))
        said.append(record.answer)
    return turns


def _error(policy: str, plan: AnyPlan, runs: Sequence[Run], cluster: Cluster, setup: FleetSetup) -> Simulated:
    hit_rates, means = [], []
    for run in runs:
        seed = run.result.seed
        conversations = conversations_of(plan.with_seed(seed).schedule(), run.records, cluster)
        records = Simulation(setup, SIMULATED_POLICIES[policy], conversations, seed=seed).run().records
        answered = [record for record in records if record.error is None]
        hit_rates.append(sum(r.cached_tokens for r in answered) / max(1, sum(r.prompt_tokens for r in answered)))
        means.append(Distribution.of([r.ttft_ms for r in answered if r.ttft_ms is not None]).mean)
    hit_rate, mean = fmean(hit_rates), fmean(means)
    live_hit_rate = fmean(run.result.hit_rate for run in runs)
    live_mean = fmean(run.result.ttft_ms.mean for run in runs)
    return Simulated(hit_rate, hit_rate - live_hit_rate, mean, mean / live_mean - 1 if live_mean else 0.0)
