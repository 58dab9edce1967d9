"""What a comparison found, in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from loadtest.results import PolicyResult, Results
from loadtest.summary import COLUMNS, cells, headline, notes, ratio_line, simulated_lines

__all__ = ["show"]

_NAME_WIDTH, _POLICY_WIDTH = 16, 32


def show(results: Results, out: Path) -> None:
    stdout = Console(width=None if sys.stdout.isatty() else _NAME_WIDTH + _POLICY_WIDTH * len(results.policies))

    def say(*lines: str) -> None:
        for line in lines:
            stdout.print(line, highlight=False, markup=False, soft_wrap=True)

    for rate in results.every_rate:
        if results.rates:
            say(f"{rate.rate:.3g} requests per second")
        stdout.print(_table(rate.policies))
        say(*map(ratio_line, rate.ratios), *simulated_lines(rate.simulated), "")
    say(headline(results), *notes(results), "", f"report: {(out / 'report.html').resolve()}")


def _table(policies: Mapping[str, PolicyResult]) -> Table:
    table = Table("", box=box.SIMPLE_HEAD, pad_edge=False)
    for policy in policies:
        table.add_column(policy, justify="right")
    for name, *row in zip(COLUMNS, *map(cells, policies.values()), strict=True):
        table.add_row(name, *(f"{value} [dim]({spread})[/dim]" if spread else value for value, spread in row))
    return table
