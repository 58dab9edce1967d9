"""From request records to `results.json`: what a run measured, what a policy did over its repeats, and the ratios.

A request that failed or was refused counts against the policy: its latencies are the whole time it was allowed.
A run is void when the load generator itself lagged; void runs enter no figure. Repeats are paired: repeat r of every
policy meets the same arrivals, so ratios are taken within a repeat and their spread is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import msgspec

from loadtest.objective import Objective
from loadtest.oracle import IdealHit
from loadtest.records import RequestRecord

__all__ = [
    "Distribution",
    "Measured",
    "PolicyResult",
    "RateResults",
    "Ratio",
    "ReplicaShare",
    "Results",
    "Run",
    "RunResult",
    "Simulated",
    "measure_run",
    "percentile",
    "ratios",
    "summarize_policy",
]

_SMALL_LAG_SHARE = 0.2
"""At p99 against the median: one request in a hundred may be that much too late, the others less."""
_ALWAYS_SMALL_LAG_MS = 1.0
_KEPT_ERRORS = 5
_DEFAULT_OBJECTIVE = Objective()


class Distribution(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        """All zero for no values."""
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0)
        return cls(fmean(values), *(percentile(values, share) for share in (0.5, 0.9, 0.99)))


class ReplicaShare(msgspec.Struct):
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured of one run, and of a policy over its valid runs. Hit rates are shares of prompt tokens."""

    requests: int
    failed: int
    ttft_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution
    goodput: float
    """Share of requests within the objective; times the rate, it is requests per second."""
    hit_rate: float
    ideal_hit_rate: float
    """Of one endless cache shared by all requests."""
    imbalance: float
    """Prompt tokens of the busiest replica over the mean of all."""
    misprediction: float
    """Tokens by which the router was wrong about what its choice had cached, as a share of prompt tokens."""
    arrival_lag_ms_p99: float
    replicas: dict[str, ReplicaShare]

    @property
    def share_of_ideal(self) -> float:
        return self.hit_rate / self.ideal_hit_rate if self.ideal_hit_rate else 0.0


class RunResult(Measured, frozen=True, kw_only=True):
    policy: str
    repeat: int
    seed: int
    void: str | None = None
    """Why nothing can be concluded from this run."""
    errors: dict[str, int] = {}
    unexplained_prompts: int = 0
    """Requests whose prompt tokens, by the engine's count, differ from those the ideal was computed from."""


class PolicyResult(Measured, frozen=True, kw_only=True):
    valid_repeats: int
    repeats: list[RunResult]


class Ratio(msgspec.Struct, frozen=True):
    """`measure` of `policy` over that of `baseline`, within each repeat: the mean and the extremes."""

    policy: str
    baseline: str
    measure: str
    mean: float
    low: float
    high: float


class Simulated(msgspec.Struct, frozen=True):
    """The same arrivals in the simulator, and by how much it was wrong: simulated less live."""

    hit_rate: float
    hit_rate_error: float
    ttft_ms_mean: float
    ttft_ms_mean_error_share: float
    """Of the live mean."""


class RateResults(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one rate gave, in requests per second."""

    rate: float
    policies: dict[str, PolicyResult]
    ratios: list[Ratio]
    simulated: dict[str, Simulated] = {}
    """By policy, where the simulator was asked."""


class Results(msgspec.Struct, frozen=True, omit_defaults=True):
    """`policies` and `ratios` are those of the highest rate; `rates` has all, lowest first, if there are several."""

    policies: dict[str, PolicyResult]
    ratios: list[Ratio]
    setup: dict[str, Any]
    rates: list[RateResults] = []
    simulated: dict[str, Simulated] = {}

    @property
    def every_rate(self) -> list[RateResults]:
        """Of one that has no name, where there is one only."""
        return self.rates or [RateResults(0.0, self.policies, self.ratios, self.simulated)]

    @property
    def sound(self) -> bool:
        """Every request was answered, and everybody has a run that is not void, at every rate."""
        every = [each for rate in self.every_rate for each in rate.policies.values()]
        return all(each.failed == 0 and each.valid_repeats > 0 for each in every)

    @classmethod
    def of(cls, rates: list[RateResults], setup: dict[str, Any]) -> Results:
        highest = rates[-1]
        several = rates if len(rates) > 1 else []
        return cls(highest.policies, highest.ratios, setup, several, highest.simulated)


@dataclass(frozen=True, slots=True)
class Run:
    """One run with what it is made of: records and, for each of them, the ideal."""

    result: RunResult
    records: Sequence[RequestRecord]
    ideals: Sequence[IdealHit | None]


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest ranks."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def measure_run(
    records: Sequence[RequestRecord],
    ideals: Sequence[IdealHit | None],
    *,
    policy: str,
    repeat: int,
    seed: int,
    replica_ids: Sequence[str],
    timeout_seconds: float,
    objective: Objective = _DEFAULT_OBJECTIVE,
) -> Run:
    """`ideals[i]` belongs to `records[i]` and is None where the request could not be asked at all."""
    measured = _measure(records, ideals, replica_ids, timeout_seconds, objective)
    counted = Counter(record.error for record in records if record.error is not None)
    result = RunResult(
        **measured,
        policy=policy,
        repeat=repeat,
        seed=seed,
        void=_void_reason(measured["arrival_lag_ms_p99"], measured["ttft_ms"].p50),
        errors=dict(counted.most_common(_KEPT_ERRORS)),
        unexplained_prompts=sum(
            record.error is None and ideal is not None and record.prompt_tokens != ideal.prompt_tokens
            for record, ideal in zip(records, ideals, strict=True)
        ),
    )
    return Run(result, records, ideals)


def summarize_policy(
    runs: Sequence[Run], timeout_seconds: float, objective: Objective = _DEFAULT_OBJECTIVE
) -> PolicyResult:
    """Latencies and tokens of all valid runs together; of the void ones, where there is no other."""
    valid = [run for run in runs if run.result.void is None]
    counted = valid or runs
    measured = _measure(
        [record for run in counted for record in run.records],
        [ideal for run in counted for ideal in run.ideals],
        list(counted[0].result.replicas),
        timeout_seconds,
        objective,
    )
    measured["imbalance"] = fmean(run.result.imbalance for run in counted)  # of sums it would hide what runs show
    return PolicyResult(**measured, valid_repeats=len(valid), repeats=[run.result for run in runs])


def ratios(policies: dict[str, PolicyResult], baseline: str, of: Sequence[str] = ()) -> list[Ratio]:
    """Every other policy, or those named, against `baseline`, over the repeats that are valid for both."""
    found = []
    for policy, result in policies.items():
        if of and policy not in of:
            continue
        pairs = [
            (ours, theirs)
            for ours in result.repeats
            for theirs in policies[baseline].repeats
            if ours.repeat == theirs.repeat and ours.void is None and theirs.void is None
        ]
        for measure in ("hit_rate", "ttft_ms_mean", "ttft_ms_p99") if policy != baseline else ():
            values = [_value(ours, measure) / base for ours, theirs in pairs if (base := _value(theirs, measure)) > 0]
            if values:
                found.append(Ratio(policy, baseline, measure, fmean(values), min(values), max(values)))
    return found


def _value(result: RunResult, measure: str) -> float:
    return {
        "hit_rate": result.hit_rate,
        "ttft_ms_mean": result.ttft_ms.mean,
        "ttft_ms_p99": result.ttft_ms.p99,
    }[measure]


def _measure(
    records: Sequence[RequestRecord],
    ideals: Sequence[IdealHit | None],
    replica_ids: Sequence[str],
    timeout_seconds: float,
    objective: Objective,
) -> dict[str, Any]:
    """The fields of `Measured`."""
    allowed_ms = timeout_seconds * 1000
    shares = {replica: ReplicaShare() for replica in replica_ids}
    for record in records:
        if record.error is None:
            share = shares.setdefault(record.replica, ReplicaShare())
            share.requests += 1
            share.prompt_tokens += record.prompt_tokens
            share.cached_tokens += record.cached_tokens
    wrong = [abs(r.predicted_tokens - r.cached_tokens) for r in records if r.predicted_tokens is not None]
    asked = [ideal for ideal in ideals if ideal is not None]
    prompt_tokens = sum(ideal.prompt_tokens for ideal in asked)
    loads = [share.prompt_tokens for share in shares.values()]
    return {
        "requests": len(records),
        "failed": sum(record.error is not None for record in records),
        "ttft_ms": Distribution.of([allowed_ms if record.ttft_ms is None else record.ttft_ms for record in records]),
        "tpot_ms": Distribution.of([record.tpot_ms for record in records if record.tpot_ms is not None]),
        "e2e_ms": Distribution.of([allowed_ms if record.e2e_ms is None else record.e2e_ms for record in records]),
        "goodput": fmean(map(objective.met_by, records)) if records else 0.0,
        "hit_rate": sum(share.cached_tokens for share in shares.values()) / max(1, prompt_tokens),
        "ideal_hit_rate": sum(ideal.cached_tokens for ideal in asked) / max(1, prompt_tokens),
        "imbalance": max(loads) / fmean(loads) if any(loads) else 1.0,
        "misprediction": sum(wrong) / max(1, prompt_tokens),
        "arrival_lag_ms_p99": percentile([record.lag_ms for record in records], 0.99),
        "replicas": shares,
    }


def _void_reason(lag_ms_p99: float, ttft_ms_p50: float) -> str | None:
    if lag_ms_p99 <= max(_ALWAYS_SMALL_LAG_MS, _SMALL_LAG_SHARE * ttft_ms_p50):
        return None
    return (
        f"the load generator lagged: {lag_ms_p99:.1f} ms at p99 is not small against a median time to first token "
        f"of {ttft_ms_p50:.1f} ms; use an idle machine or a lower rate"
    )
