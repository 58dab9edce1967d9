"""One HTML file that says what a comparison found, shows it, and tells how it was measured.

It is whole in itself: no script, no font, no picture comes from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from loadtest import plots
from loadtest.results import PolicyResult, Ratio, Results, Run
from loadtest.summary import COLUMNS, cells, headline, notes, ratio_line

__all__ = ["write_report"]


def write_report(
    path: Path, results: Results, runs: Mapping[str, Sequence[Run]], method: Sequence[str] | None = None
) -> None:
    """`runs` are the ones that the figures of `results` rest on, by policy; `method` tells how, if not by `compare`."""
    sections = [
        ("Time to first token", _TTFT_NOTE, plots.ttft_distribution(runs)),
        ("Hit rate against the ideal", _HIT_NOTE, plots.hit_rates(results.policies)),
        ("Load per replica", _LOAD_NOTE, plots.load_per_replica(results.policies)),
        ("Time to first token, request by request", _TIME_NOTE, plots.ttft_over_time(runs)),
    ]
    figures = "".join(
        f"<section><h2>{title}</h2><p>{note}</p><figure>{svg}</figure></section>" for title, note, svg in sections
    )
    path.write_text(
        _PAGE.substitute(
            headline=escape(headline(results)),
            warnings="".join(f'<p class="warning">{escape(note)}</p>' for note in notes(results)),
            table=_table(results.policies),
            ratios=_ratios(results.ratios),
            figures=figures,
            setup=_definitions(results.setup),
            method="".join(f"<li>{escape(line)}</li>" for line in method or _METHOD),
        ),
        encoding="utf-8",
    )


def _table(policies: Mapping[str, PolicyResult]) -> str:
    heads = "".join(f"<th>{column}</th>" for column in ("policy", *COLUMNS))
    rows = []
    for policy, colour in plots.colours(list(policies)).items():
        body = "".join(f"<td>{value}<small>{spread}</small></td>" for value, spread in cells(policies[policy]))
        rows.append(f'<tr><th><i style="background:{colour}"></i>{escape(policy)}</th>{body}</tr>')
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _ratios(ratios: Sequence[Ratio]) -> str:
    if not ratios:
        return ""
    items = "".join(f"<li>{escape(ratio_line(ratio))}</li>" for ratio in ratios)
    note = "Small figures: lowest and highest repeat. Ratios within each repeat, with their extremes:"
    return f"<p>{note}</p><ul>{items}</ul>"


def _definitions(setup: Mapping[str, object]) -> str:
    return "".join(f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{_text(value)}</dd>" for name, value in setup.items())


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{escape(str(name)).replace('_', ' ')} {_text(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(part) for part in value)
    return escape(str(value))


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
    "latency.",
    "Every run starts with a fresh router and cold replicas: caches are emptied and seen to be empty. Policies take "
    "turns at going first. Each repeat has a seed of its own; ratios are paired by repeat.",
    "Requests that failed or were refused count against the policy, with all the time they were allowed.",
    "The load generator measures its own lag. A run whose lag at p99 exceeds a fifth of the median time to first "
    "token is void and enters no figure, unless a policy has no other.",
    "Hit rates are shares of prompt tokens, by the engines' own count. Imbalance is the prompt tokens of the "
    "busiest replica over the mean.",
)

_PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Warmroute: comparison of policies</title>
<style>
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5d6673; --rule: #dde1e6; --page: #fff; --warn: #fff4e5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --soft: #98a2b0; --rule: #343a43; --page: #14171b; --warn: #3a2c17; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 3rem 1.5rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
header small { letter-spacing: .08em; text-transform: uppercase; color: var(--soft); font-weight: 600; }
h1 { font-size: 1.65rem; line-height: 1.3; font-weight: 650; margin: .4rem 0 1.6rem; text-wrap: balance; }
h2 { font-size: 1.1rem; margin: 2.8rem 0 .3rem; }
section p, ul, dl { color: var(--soft); margin: .2rem 0 1rem; max-width: 46rem; font-size: .94rem; }
figure { margin: 0; }
svg { width: 100%; height: auto; display: block; color: var(--ink); font-family: inherit; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .5rem .45rem; border-bottom: 1px solid var(--rule); vertical-align: top; }
th:first-child { text-align: left; white-space: nowrap; }
thead th { font-weight: 500; color: var(--soft); font-size: .8rem; }
td { white-space: nowrap; }
td small { display: block; color: var(--soft); font-size: .76rem; }
th i { display: inline-block; width: .65rem; height: .65rem; border-radius: 2px; margin-right: .5rem; }
.wide { overflow-x: auto; }
ul { padding-left: 1.1rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; }
dt { color: var(--soft); } dd { margin: 0; color: var(--ink); overflow-wrap: anywhere; }
.warning { background: var(--warn); border-radius: 6px; padding: .6rem .9rem; font-size: .92rem; }
</style>
<header><small>Warmroute comparison</small><h1>$headline</h1></header>
$warnings
<div class="wide">$table</div>
<section>$ratios</section>
$figures
<section><h2>Setup</h2><dl>$setup</dl></section>
<section><h2>Method</h2><ul>
$method
</ul></section>
</html>
""")
