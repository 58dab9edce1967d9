"""What a run asks and when: a workload's plan or a trace's, at each of the rates asked for."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import msgspec

from loadtest.oracle import EncodePrompt
from loadtest.simulator.profiles import Profile
from loadtest.trace_plan import TracePlan
from loadtest.workloads import SHAPES, Plan, Session, Shape
from replica.backend import simulated_cost
from shared.settings import CompareSettings, ReplicaSettings, SettingsError, parse

__all__ = [
    "AnyPlan",
    "plan_of",
    "plans_at_rates",
    "read_plan",
    "replica_flags",
    "replica_settings",
    "simulated_profile",
    "write_plan",
]

AnyPlan = Plan | TracePlan

_DEFAULT_RATES = {"torch": 2.0, "sim": 20.0}
_ANSWER_WORD = " word"


class _File(msgspec.Struct, omit_defaults=True):
    """One of the two."""

    workload: Plan | None = None
    trace: TracePlan | None = None


def write_plan(path: Path, plan: AnyPlan) -> None:
    file = _File(workload=plan) if isinstance(plan, Plan) else _File(trace=plan)
    path.write_bytes(msgspec.json.encode(file))


def read_plan(path: Path) -> AnyPlan:
    """Raises OSError and ValueError."""
    file = msgspec.json.decode(path.read_bytes(), type=_File)
    plan = file.workload or file.trace
    if plan is None:
        raise ValueError(f"{path} has no plan in it")
    return plan


def plan_of(settings: CompareSettings) -> AnyPlan:
    """At `--rate`, or at what is usual. Raises TraceError, and SettingsError for any setting that will be needed."""
    replica_settings(settings)
    for told in settings.rates:
        _number(told)
    if settings.trace is None:
        rate = settings.rate or _DEFAULT_RATES[settings.engine]
        return Plan(settings.workload, _shape(settings), settings.seed, rate, settings.requests)
    plan = TracePlan(settings.trace, settings.seed, settings.requests, settings.scale, settings.shrink)
    return plan.with_rate(settings.rate or plan.rate)


def plans_at_rates(plan: AnyPlan, settings: CompareSettings, encode: EncodePrompt) -> list[AnyPlan]:
    """One for each of `--rates`, the lowest first; `plan` itself, at its rate, where there are none."""
    if not settings.rates:
        return [plan.with_rate(settings.rate or plan.rate)]
    full = _full_rate(plan.schedule(), settings, encode) if any(r.endswith("%") for r in settings.rates) else 0.0
    rates = {_number(told) * (full / 100 if told.endswith("%") else 1) for told in settings.rates}
    return [plan.with_rate(rate) for rate in sorted(rates)]


def replica_settings(settings: CompareSettings) -> ReplicaSettings:
    """What the replicas are told. Raises SettingsError."""
    return parse(ReplicaSettings, replica_flags(settings), os.environ, "--replica-flags")


def replica_flags(settings: CompareSettings) -> list[str]:
    """Raises SettingsError."""
    threads = settings.threads or max(1, (os.cpu_count() or 1) // settings.replicas)
    flags = ["--engine", settings.engine, "--model", settings.model, "--threads", str(threads)]
    flags += ["--block-size", str(settings.block_size), "--token-budget", str(settings.token_budget)]
    flags += [] if settings.blocks is None else ["--blocks", str(settings.blocks)]
    try:
        return [*flags, *shlex.split(settings.replica_flags)]
    except ValueError as error:
        raise SettingsError(f"--replica-flags: {error}") from None


def simulated_profile(replica: ReplicaSettings, capacity_tokens: int) -> Profile:
    return Profile(simulated_cost(replica), capacity_tokens, replica.token_budget)


def _full_rate(sessions: Sequence[Session], settings: CompareSettings, encode: EncodePrompt) -> float:
    """Requests per second that would keep every replica computing, if nothing were ever cached."""
    profile = simulated_profile(replica_settings(settings), 0)
    prompts = [
        len(encode(session.messages([_ANSWER_WORD * before.max_tokens for before in session.turns[:turn]])))
        for session in sessions
        for turn in range(len(session.turns))
    ]
    return settings.replicas / fmean(profile.alone_seconds(tokens, tokens) for tokens in prompts)


def _number(told: str) -> float:
    try:
        number = float(told.removesuffix("%"))
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise SettingsError(f"--rates: {told!r} is neither like 2.5 (requests per second) nor like 75%")
    return number


def _shape(settings: CompareSettings) -> Shape:
    """The workload's usual one, with what the settings say instead."""
    usual = SHAPES[settings.workload]
    given = {name: value for name in asdict(usual) if (value := getattr(settings, name)) is not None}
    return replace(usual, **given)
