"""Figures mean what they say: failures count, lagging runs are void, ratios are paired by repeat."""

from __future__ import annotations

import statistics

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.oracle import IdealHit
from loadtest.records import RequestRecord
from loadtest.results import Results, Run, measure_run, percentile, ratios, summarize_policy

NUMBERS = st.floats(0, 1e6)


def record(ttft_ms: float | None, *, cached: int = 0, replica: str = "a", lag_ms: float = 0.0) -> RequestRecord:
    return RequestRecord(
        session=0,
        turn=0,
        scheduled_seconds=0.0,
        sent_seconds=0.0,
        lag_ms=lag_ms,
        ttft_ms=ttft_ms,
        e2e_ms=ttft_ms,
        error="refused" if ttft_ms is None else None,
        prompt_tokens=0 if ttft_ms is None else 100,
        cached_tokens=cached,
        replica=replica,
    )


def run(*records: RequestRecord, policy: str = "p", repeat: int = 0, ideal: int = 80) -> Run:
    return measure_run(
        records,
        [IdealHit(100, ideal) for _ in records],
        policy=policy,
        repeat=repeat,
        seed=repeat,
        replica_ids=["a", "b"],
        timeout_seconds=10.0,
    )


@given(values=st.lists(NUMBERS, min_size=2, max_size=50))
def test_percentiles_agree_with_the_standard_library(values: list[float]) -> None:
    hundredths = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (1, 50, 90, 99):
        assert percentile(values, percent / 100) == pytest.approx(hundredths[percent - 1], abs=1e-6)


@given(value=NUMBERS, share=st.floats(0, 1))
def test_every_percentile_of_one_value_is_that_value(value: float, share: float) -> None:
    assert percentile([value], share) == value


def test_misprediction_counts_tokens_expected_in_vain_and_found_unexpectedly() -> None:
    right, vain, unexpected, silent = (
        msgspec.structs.replace(record(1.0, cached=48), predicted_tokens=predicted) for predicted in (48, 80, 16, None)
    )
    assert run(right, vain, unexpected, silent).result.misprediction == pytest.approx((0 + 32 + 32) / 400)


def test_a_failed_request_costs_the_whole_time_it_was_allowed_and_its_prompt_is_no_hit() -> None:
    result = run(record(100.0, cached=60), record(None)).result
    assert (result.requests, result.failed, result.errors) == (2, 1, {"refused": 1})
    assert result.ttft_ms.mean == pytest.approx((100 + 10_000) / 2)
    assert result.hit_rate == pytest.approx(60 / 200)
    assert result.ideal_hit_rate == pytest.approx(0.8)


def test_imbalance_counts_replicas_that_got_nothing() -> None:
    assert run(record(1.0), record(1.0)).result.imbalance == pytest.approx(2.0)
    assert run(record(1.0), record(1.0, replica="b")).result.imbalance == pytest.approx(1.0)


@pytest.mark.parametrize(("lag_ms", "void"), [(19.9, False), (20.1, True)])
def test_a_run_is_void_when_the_generators_lag_is_not_small_against_the_median(lag_ms: float, void: bool) -> None:
    result = run(*[record(100.0, lag_ms=lag_ms)] * 5).result
    assert (result.void is not None) is void
    assert result.arrival_lag_ms_p99 == pytest.approx(lag_ms)


def test_a_void_run_enters_no_figure_but_stays_among_the_repeats() -> None:
    summary = summarize_policy([run(record(100.0)), run(record(900.0, lag_ms=500.0), repeat=1)], 10.0)
    assert summary.ttft_ms.mean == pytest.approx(100.0)
    assert (summary.valid_repeats, len(summary.repeats)) == (1, 2)


def test_ratios_are_taken_within_each_repeat_that_is_valid_for_both() -> None:
    ours = [run(record(50.0, cached=80)), run(record(90.0, cached=60), repeat=1), run(record(1.0), repeat=2)]
    theirs = [
        run(record(100.0, cached=40)),
        run(record(100.0, cached=20), repeat=1),
        run(record(1.0, lag_ms=99.0), repeat=2),
    ]
    policies = {"ours": summarize_policy(ours, 10.0), "theirs": summarize_policy(theirs, 10.0)}
    found = {ratio.measure: ratio for ratio in ratios(policies, baseline="theirs")}
    assert {ratio.policy for ratio in found.values()} == {"ours"}
    assert (found["hit_rate"].low, found["hit_rate"].mean, found["hit_rate"].high) == pytest.approx((2.0, 2.5, 3.0))
    assert (found["ttft_ms_mean"].low, found["ttft_ms_mean"].high) == pytest.approx((0.5, 0.9))


def test_prompts_that_the_ideal_was_not_computed_from_are_counted() -> None:
    strange = measure_run(
        [record(1.0)],
        [IdealHit(99, 0)],
        policy="p",
        repeat=0,
        seed=0,
        replica_ids=["a"],
        timeout_seconds=1.0,
    )
    assert strange.result.unexplained_prompts == 1


def test_results_have_the_published_format() -> None:
    results = Results({"p": summarize_policy([run(record(100.0, cached=40))], 10.0)}, [], {"model": "tiny"})
    document = msgspec.json.decode(msgspec.json.encode(results))
    policy = document["policies"]["p"]
    for measure in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert {"mean", "p50", "p90", "p99"} <= policy[measure].keys()
    wanted = {"requests", "failed", "hit_rate", "ideal_hit_rate", "imbalance", "arrival_lag_ms_p99", "repeats"}
    assert wanted <= policy.keys()
    assert wanted - {"repeats"} <= policy["repeats"][0].keys()
    assert document["setup"] == {"model": "tiny"}
