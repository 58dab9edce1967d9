"""One HTML file that says what a comparison found, shows it, and tells how it was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from loadtest import plots
from loadtest.page import Figure, figures, page, table
from loadtest.results import PolicyResult, RateResults, Ratio, Results, Run
from loadtest.summary import COLUMNS, cells, headline, notes, ratio_line, simulated_lines

__all__ = ["write_report"]


def write_report(
    path: Path, results: Results, runs: Mapping[str, Sequence[Run]], method: Sequence[str] | None = None
) -> None:
    """`runs` are the ones that the figures of `results` rest on, by policy; `method` tells how, if not by `compare`."""
    at = f" at {results.rates[-1].rate:.3g} requests/s" if results.rates else ""
    curves = [Figure("Over the rates", _RATES_NOTE, plots.over_rates(results.rates))] if results.rates else []
    drawn = [
        Figure(f"Time to first token{at}", _TTFT_NOTE, plots.ttft_distribution(runs)),
        Figure(f"Hit rate against the ideal{at}", _HIT_NOTE, plots.hit_rates(results.policies)),
        Figure(f"Load per replica{at}", _LOAD_NOTE, plots.load_per_replica(results.policies)),
        Figure(f"Time to first token, request by request{at}", _TIME_NOTE, plots.ttft_over_time(runs)),
    ]
    written = page(
        title="comparison",
        headline=headline(results),
        warnings=notes(results),
        body=figures(curves) + "".join(_rate(each, bool(curves)) for each in results.every_rate) + figures(drawn),
        setup=results.setup,
        method=method or _METHOD,
    )
    path.write_text(written, encoding="utf-8")


def _rate(rate: RateResults, named: bool) -> str:
    heading = f"<h2>{rate.rate:.3g} requests per second</h2>" if named else ""
    simulated = "".join(f"<li>{escape(line)}</li>" for line in simulated_lines(rate.simulated))
    simulated = simulated and f"<p>The same prompts and arrivals in the simulator:</p><ul>{simulated}</ul>"
    return f"{heading}{_table(rate.policies)}<section>{_ratios(rate.ratios)}{simulated}</section>"


def _table(policies: Mapping[str, PolicyResult]) -> str:
    rows = []
    for policy, colour in plots.colours(list(policies)).items():
        body = "".join(f"<td>{value}<small>{spread}</small></td>" for value, spread in cells(policies[policy]))
        rows.append(f'<tr><th><i style="background:{colour}"></i>{escape(policy)}</th>{body}</tr>')
    return table(("policy", *COLUMNS), rows)


def _ratios(ratios: Sequence[Ratio]) -> str:
    if not ratios:
        return ""
    items = "".join(f"<li>{escape(ratio_line(ratio))}</li>" for ratio in ratios)
    note = "Small figures: lowest and highest repeat. Ratios within each repeat, with their extremes:"
    return f"<p>{note}</p><ul>{items}</ul>"


_RATES_NOTE = (
    "Left the time to first token, mean (full) and p99 (dotted); right the requests per second that kept within the "
    "objective. Shaded: from the lowest to the highest repeat. The page's first sentence and last figures are of "
    "the highest rate."
)
_TTFT_NOTE = (
    "Share of requests that had their first token within a time, counted from the scheduled arrival. Bold: all repeats "
    "together; thin: each repeat. Further left is better."
)
_HIT_NOTE = (
    "Share of prompt tokens that replicas did not have to compute. Dots are repeats. The ideal is one endless cache "
    "shared by all replicas, fed with the very prompts and answers of these runs, token by token."
)
_LOAD_NOTE = "What each replica was given. Even bars are a balanced fleet; what is computed is what costs time."
_TIME_NOTE = "All repeats laid over each other. A queue that never drains would climb to the right."

_METHOD = (
    "Open loop: arrivals are scheduled beforehand from a seed, the same for every policy, and latency counts from "
    "the scheduled time. A turn whose previous answer is late goes as soon as it can; that wait is part of its "
    "latency. A trace's turn is asked so long after the answer before it as it was in the trace.",
    "Every run starts with a fresh router and cold replicas: caches are emptied and seen to be empty. Policies take "
    "turns at going first. Each repeat has a seed of its own; ratios are paired by repeat.",
    "Requests that failed or were refused count against the policy, with all the time they were allowed.",
    "The load generator measures its own lag. A run whose lag at p99 exceeds a fifth of the median time to first "
    "token is void and enters no figure, unless a policy has no other.",
    "Hit rates are shares of prompt tokens, by the engines' own count. Imbalance is the prompt tokens of the "
    "busiest replica over the mean. Goodput is the share of requests within the objective that the setup names.",
)
