"""A comparison in words and cells, the same for the terminal and the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from loadtest.results import Measured, PolicyResult, Ratio, Results, Simulated

__all__ = ["COLUMNS", "Cell", "cells", "headline", "notes", "ratio_line", "simulated_lines"]


class Cell(NamedTuple):
    value: str
    spread: str
    """The lowest and highest repeat; empty where there is one only."""


_Read = Callable[[Measured], float]
_FORMS: dict[str, tuple[_Read, str]] = {
    "TTFT mean": (lambda measured: measured.ttft_ms.mean, "{:,.0f} ms"),
    "TTFT p50": (lambda measured: measured.ttft_ms.p50, "{:,.0f} ms"),
    "TTFT p90": (lambda measured: measured.ttft_ms.p90, "{:,.0f} ms"),
    "TTFT p99": (lambda measured: measured.ttft_ms.p99, "{:,.0f} ms"),
    "TPOT mean": (lambda measured: measured.tpot_ms.mean, "{:,.1f} ms"),
    "goodput": (lambda measured: measured.goodput, "{:.1%}"),
    "hit rate": (lambda measured: measured.hit_rate, "{:.1%}"),
    "ideal": (lambda measured: measured.ideal_hit_rate, "{:.1%}"),
    "of ideal": (lambda measured: measured.share_of_ideal, "{:.0%}"),
    "imbalance": (lambda measured: measured.imbalance, "{:.2f}"),
    "lag p99": (lambda measured: measured.arrival_lag_ms_p99, "{:,.1f} ms"),
}
COLUMNS = (*_FORMS, "failed")
_MEASURES = {"hit_rate": "hit rate", "ttft_ms_mean": "mean TTFT", "ttft_ms_p99": "p99 TTFT"}
_RATIO_FORM = "{:.2f}\N{MULTIPLICATION SIGN}"


def cells(result: PolicyResult) -> list[Cell]:
    """One for each of COLUMNS."""
    valid = [run for run in result.repeats if run.void is None]
    row = [
        Cell(form.format(read(result)), _range([read(run) for run in valid], form)) for read, form in _FORMS.values()
    ]
    return [*row, Cell(f"{result.failed} of {result.requests}", "")]


def headline(results: Results) -> str:
    """The finding in a sentence, with its spread: against somebody else's router, if there is one."""
    reasons = [run.void for result in results.policies.values() for run in result.repeats]
    if reasons and all(reasons):
        return "No finding: every run is void, and the figures are those of void runs."
    found = {(ratio.policy, ratio.measure): ratio for ratio in results.ratios}  # peers come last
    at = f"At {results.rates[-1].rate:.3g} requests per second " if results.rates else ""
    for policy, result in results.policies.items():
        hits, ttft = found.get((policy, "hit_rate")), found.get((policy, "ttft_ms_mean"))
        if hits and ttft:
            base = results.policies[ttft.baseline]
            return (
                f"{at}{policy} needs {_times(ttft)} the mean time to first token of {ttft.baseline}, at "
                f"{_times(hits)} its hit rate: {result.hit_rate:.0%} against {base.hit_rate:.0%}, where "
                f"{result.ideal_hit_rate:.0%} would be ideal."
            )
    return " ".join(
        f"{policy}: hit rate {result.hit_rate:.0%} of an ideal {result.ideal_hit_rate:.0%}, mean time to first token "
        f"{result.ttft_ms.mean:,.0f} ms."
        for policy, result in results.policies.items()
    )


def ratio_line(ratio: Ratio) -> str:
    return f"{ratio.policy} against {ratio.baseline}: {_MEASURES[ratio.measure]} {_times(ratio)}"


def simulated_lines(simulated: Mapping[str, Simulated]) -> list[str]:
    """By how much the simulator was wrong, policy by policy."""
    return [
        f"{policy} simulated: hit rate {each.hit_rate:.1%} ({100 * each.hit_rate_error:+.1f} points), mean TTFT "
        f"{each.ttft_ms_mean:,.0f} ms ({each.ttft_ms_mean_error_share:+.1%})"
        for policy, each in simulated.items()
    ]


def notes(results: Results) -> list[str]:
    """What a reader must know before believing the figures; empty when all is well."""
    if results.rates:
        return [f"{rate.rate:.3g}/s: {note}" for rate in results.rates for note in _notes(rate.policies)]
    return _notes(results.policies)


def _notes(policies: Mapping[str, PolicyResult]) -> list[str]:
    found = []
    for policy, result in policies.items():
        if void := [run.void for run in result.repeats if run.void]:
            found.append(f"{policy}: {len(void)} of {len(result.repeats)} runs are void: {void[0]}.")
        if result.failed:
            errors = "; ".join(dict.fromkeys(error for run in result.repeats for error in run.errors))
            found.append(f"{policy}: {result.failed} of {result.requests} requests failed: {errors}")
        if unexplained := sum(run.unexplained_prompts for run in result.repeats):
            found.append(
                f"{policy}: the engine counted {unexplained} prompts differently than the ideal did; "
                "do not trust the ideal."
            )
    return found


def _times(ratio: Ratio) -> str:
    return f"{_RATIO_FORM.format(ratio.mean)} ({_range([ratio.low, ratio.high], '{:.2f}')})"


def _range(values: list[float], form: str) -> str:
    if len(values) < 2:
        return ""
    low, high = (form.format(extreme).split()[0].rstrip("%") for extreme in (min(values), max(values)))
    return f"{low}\N{EN DASH}{high}"
