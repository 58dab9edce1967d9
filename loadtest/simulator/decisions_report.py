"""`warmroute simulate --decisions`: regret by policy, and how well first tokens were predicted: table and report."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from loadtest.results import Distribution
from loadtest.simulator.decisions import (
    AS_LOGGED,
    DecisionLogEmptyError,
    LoggedDecision,
    Replayed,
    Told,
    read_decisions,
    replay,
)
from router.policies import POLICIES
from shared.settings import SettingsError, SimulateSettings

__all__ = ["Calibration", "DecisionResults", "Regret", "calibrated", "run"]

_MOST_DRAWN = 2000


class Regret(msgspec.Struct, frozen=True):
    """Seconds that a policy's choices cost above the best candidate, as the log priced them."""

    decisions: int
    agreement: float
    """Share of decisions that were the log's."""
    regret_seconds: Distribution
    total_seconds: float


class Calibration(msgspec.Struct, frozen=True):
    """Streamed requests whose first token was logged: what the chosen replica was expected to take, and took."""

    requests: int
    predicted_seconds: Distribution
    actual_seconds: Distribution
    ratio: float
    """All predicted seconds over all actual ones: below 1, the router expects too little."""
    error_share: Distribution
    """Of each request: how far off, as a share of the actual time."""
    predicted_tokens: int
    cached_tokens: int
    """Both of requests whose engine said how much of the prompt it held."""


class DecisionResults(msgspec.Struct, frozen=True):
    policies: dict[str, Regret]
    calibration: Calibration | None
    setup: dict[str, Any]


def run(settings: SimulateSettings, path: Path) -> int:
    """The exit code. Raises SettingsError for a file or a policy that cannot be used."""
    policies = list(POLICIES) if settings.policies == ("all",) else list(dict.fromkeys(settings.policies))
    for name in policies:
        if name not in POLICIES:
            raise SettingsError(f"--policies: {name!r} is not one of all, {', '.join(POLICIES)}")
    try:
        told = read_decisions(path)
    except OSError as error:
        raise SettingsError(f"--decisions: {path} cannot be read ({error.strerror})") from None
    except DecisionLogEmptyError as error:
        raise SettingsError(f"--decisions: {error}") from None
    replayed = {name: replay(name, told.decisions, settings.seed) for name in (AS_LOGGED, *policies)}
    timed = [decision for decision in told.decisions if decision.line.streamed and decision.first_token is not None]
    results = DecisionResults(
        {name: _regret(each) for name, each in replayed.items()}, calibrated(timed), _described(told, path)
    )
    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2))
    if importlib.util.find_spec("matplotlib") is not None:
        _write_page(out / "report.html", results, replayed, timed)
    _show(results, out)
    return 0


def calibrated(timed: Sequence[LoggedDecision]) -> Calibration | None:
    """None where no first token was logged."""
    if not timed:
        return None
    predicted, actual = _times(timed)
    errors = [abs(p - a) / max(a, 1e-6) for p, a in zip(predicted, actual, strict=True)]
    counted = [
        (decision.chosen.predicted_tokens, decision.first_token.cached_tokens)
        for decision in timed
        if decision.first_token is not None and decision.first_token.cached_tokens is not None
    ]
    return Calibration(
        requests=len(timed),
        predicted_seconds=Distribution.of(predicted),
        actual_seconds=Distribution.of(actual),
        ratio=sum(predicted) / max(sum(actual), 1e-6),
        error_share=Distribution.of(errors),
        predicted_tokens=sum(tokens for tokens, _ in counted),
        cached_tokens=sum(tokens for _, tokens in counted),
    )


def _times(timed: Sequence[LoggedDecision]) -> tuple[list[float], list[float]]:
    """Predicted and actual seconds to the first token."""
    chosen = [decision.chosen for decision in timed]
    actual = [decision.first_token.seconds for decision in timed if decision.first_token is not None]
    return [candidate.wait_seconds + candidate.service_seconds for candidate in chosen], actual


def _regret(replayed: Replayed) -> Regret:
    regrets = replayed.regrets
    return Regret(len(regrets), replayed.agreed / len(regrets), Distribution.of(regrets), sum(regrets))


def _described(told: Told, path: Path) -> dict[str, Any]:
    lines = [decision.line for decision in told.decisions]
    begin, end = (datetime.fromtimestamp(line.at, UTC).isoformat(timespec="seconds") for line in (lines[0], lines[-1]))
    return {
        "what": "decisions of a running router, asked again with what it knew when it made them",
        "log": path.name,
        "from": begin,
        "to": end,
        "decisions": len(lines),
        "requests": len({line.id for line in lines}),
        "policies_that_decided": dict(Counter(line.policy for line in lines)),
        "views": dict(Counter(line.view for line in lines)),
        "replicas": len({candidate.replica_id for line in lines for candidate in line.candidates}),
        "lines_skipped": told.skipped,
        "lines_the_router_dropped": told.dropped,
    }


_COLUMNS = ("regret mean", "p50", "p99", "total", "agreeing")


def _cells(regret: Regret) -> tuple[str, ...]:
    spread = regret.regret_seconds
    milliseconds = (f"{seconds * 1e3:,.1f} ms" for seconds in (spread.mean, spread.p50, spread.p99))
    return (*milliseconds, f"{regret.total_seconds:,.2f} s", f"{regret.agreement:.1%}")


def _calibration_line(found: Calibration | None) -> str:
    if found is None:
        return "No first token of a streamed answer was logged: nothing to compare predictions with."
    line = (
        f"First tokens of {found.requests:,} streamed answers: predicted {found.predicted_seconds.mean * 1e3:,.0f} ms, "
        f"actual {found.actual_seconds.mean * 1e3:,.0f} ms on average ({found.ratio:.2f} of it); "
        f"half are off by less than {found.error_share.p50:.0%}, nine of ten by less than {found.error_share.p90:.0%}."
    )
    if found.predicted_tokens or found.cached_tokens:
        line += f" Cached tokens: {found.predicted_tokens:,} predicted, {found.cached_tokens:,} found."
    return line


def _warnings(results: DecisionResults) -> list[str]:
    skipped, dropped = results.setup["lines_skipped"], results.setup["lines_the_router_dropped"]
    return [
        *([f"{skipped:,} lines could not be read and were skipped."] if skipped else []),
        *([f"The router could not write {dropped:,} lines."] if dropped else []),
    ]


def _show(results: DecisionResults, out: Path) -> None:
    stdout = Console(width=None if sys.stdout.isatty() else 200)
    table = Table("policy", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for policy, regret in results.policies.items():
        table.add_row(policy, *_cells(regret))
    stdout.print(table)
    lines = (
        _calibration_line(results.calibration),
        f"{results.setup['decisions']:,} decisions on {results.setup['replicas']} replicas",
        *_warnings(results),
        f"report: {(out / 'report.html').resolve()}",
    )
    stdout.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _write_page(
    path: Path, results: DecisionResults, replayed: Mapping[str, Replayed], timed: Sequence[LoggedDecision]
) -> None:
    from loadtest import plots
    from loadtest.page import Figure, figures, page, table

    drawn = [Figure("Regret", _REGRET_NOTE, plots.regrets({name: each.regrets for name, each in replayed.items()}))]
    if timed:
        thinned = timed[:: max(1, len(timed) // _MOST_DRAWN)]
        drawn.append(Figure("Time to first token", _CALIBRATION_NOTE, plots.calibration(*_times(thinned))))
    rows = []
    for policy, colour in plots.colours(list(results.policies)).items():
        cells = "".join(f"<td>{cell}</td>" for cell in _cells(results.policies[policy]))
        rows.append(f'<tr><th><i style="background:{colour}"></i>{escape(policy)}</th>{cells}</tr>')
    written = page(
        title="decisions asked again",
        headline=_calibration_line(results.calibration),
        warnings=_warnings(results),
        body=table(("policy", *_COLUMNS), rows) + figures(drawn),
        setup=results.setup,
        method=_METHOD,
    )
    path.write_text(written, encoding="utf-8")


_REGRET_NOTE = (
    "Share of decisions whose choice cost at most so much more than the cheapest candidate. Further up is better."
)
_CALIBRATION_NOTE = (
    "Each dot is a streamed answer: the wait and prefill that its replica was chosen for, against the time until its "
    "first token. Above the line it took longer than expected."
)
_METHOD = (
    "Each logged decision is put to the router's own policy classes again, with the candidates and prices of the log. "
    "Policies that remember remember their own choices.",
    "Regret is the cost of a choice less that of the cheapest candidate, in the log's seconds. It judges choices one "
    "by one: what another choice would have made of loads and caches is not in a log.",
    "The row 'as logged' is the router's own choice, whatever policy it ran.",
)
