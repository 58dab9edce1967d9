"""What every bench leaves: a table at the terminal, a figure and `results.json` in its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from loadtest.plots import colours

__all__ = ["BenchReport", "Lines", "draw_lines"]

Lines = Mapping[str, Sequence[tuple[float, float, float, float]]]
"""By label, points (x, median, least, most)."""


class BenchReport:
    def __init__(self, name: str, out: str, console: Console) -> None:
        self._folder = Path(out) / name
        self._name = name
        self._console = console
        self._folder.mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)

    def write(self, results: Mapping[str, Any], panels: Sequence[Callable[[Any], None]]) -> None:
        """Each of `panels` draws into axes of its own."""
        import matplotlib as mpl
        from matplotlib.figure import Figure

        (self._folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        picture = self._folder / f"{self._name}.svg"
        with mpl.rc_context({"svg.fonttype": "none", "font.size": 9.5, "axes.spines.top": False}):
            figure = Figure(figsize=(4.6 * len(panels), 3.6), layout="constrained")
            for axes, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
                draw(axes)
            figure.savefig(picture)
        self.say(f"{picture}\n{self._folder / 'results.json'}\n")


def draw_lines(axes: Any, lines: Lines, title: str, x: str, y: str, *, log_y: bool = False) -> None:
    """A line for each label through the medians, and its spread as a shade. Each step of x is a doubling."""
    for label, colour in colours(list(lines)).items():
        xs, medians, least, most = zip(*lines[label], strict=True)
        axes.plot(xs, medians, label=label, color=colour, marker="o", markersize=3)
        axes.fill_between(xs, least, most, color=colour, alpha=0.2, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    if log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False)
