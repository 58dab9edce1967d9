"""The figures of a report, as SVG to stand inside a page: text takes the page's font, ink and rules its colours."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from loadtest.results import Measured, PolicyResult, RateResults, Run

__all__ = [
    "calibration",
    "colours",
    "hit_rates",
    "load_per_replica",
    "regrets",
    "ttft_distribution",
    "ttft_over_time",
]

_PALETTE = ("#0f9d8a", "#e07b39", "#5b6ee1", "#c2468f", "#7c8798", "#b59a1d", "#3d9be9", "#8d5bc9", "#57803a")
# Colours that the page fills in, so that a figure suits a light and a dark one.
_INK, _RULE = "#0a0b0c", "#0d0e0f"
_PAGE_COLOURS = {_INK: "currentColor", _RULE: "var(--rule)"}
_WIDTH_INCHES = 8.8
_LEAST_MS = 0.1
"""What stands for nothing at all on a logarithmic axis."""

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _RULE,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _RULE,
    "grid.linewidth": 0.7,
    "xtick.color": _RULE,
    "ytick.color": _RULE,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "lines.solid_capstyle": "round",
}

Runs = Mapping[str, Sequence[Run]]


def colours(policies: Sequence[str]) -> dict[str, str]:
    return dict(zip(policies, cycle(_PALETTE), strict=False))


def ttft_distribution(runs: Runs) -> str:
    """Share of requests answered within a time, log x: bold over all repeats, thin for each of them."""
    figure, axes = _figure(3.4)
    for policy, colour in colours(list(runs)).items():
        each = [_ttfts(run) for run in runs[policy]]
        for values in each:
            _cdf(axes, values, color=colour, linewidth=0.8, alpha=0.45)
        _cdf(axes, [v for values in each for v in values], color=colour, linewidth=2.2, label=policy)
    axes.set_xscale("log")
    axes.set_xlabel("time to first token, ms (log)")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _plain_log_ticks(axes, "x")
    axes.legend(loc="lower right", frameon=False, labelcolor=_INK)
    return _svg(figure, "ttft")


def ttft_over_time(runs: Runs) -> str:
    """Every request of every repeat at its scheduled time: a queue that builds up is seen to rise."""
    figure, axes = _figure(2.8)
    for policy, colour in colours(list(runs)).items():
        points = [(r.scheduled_seconds, r.ttft_ms) for run in runs[policy] for r in run.records if r.ttft_ms]
        at, ttft = zip(*points, strict=True) if points else ((), ())
        axes.scatter(at, ttft, s=11, color=colour, alpha=0.55, linewidths=0, label=policy)
    axes.set_yscale("log")
    axes.set_xlabel("scheduled arrival, seconds into the run")
    axes.set_ylabel("ms (log)")
    _plain_log_ticks(axes, "y")
    axes.margins(x=0.01)
    return _svg(figure, "time")


def hit_rates(policies: Mapping[str, PolicyResult]) -> str:
    """One bar per policy, a dot per repeat, and a mark at the ideal."""
    figure, axes = _figure(0.75 + 0.52 * len(policies))
    for row, (policy, colour) in enumerate(colours(list(policies)).items()):
        result = policies[policy]
        axes.barh(row, result.hit_rate, height=0.56, color=colour)
        axes.vlines(result.ideal_hit_rate, row - 0.38, row + 0.38, color=_INK, linewidth=1.6)
        each = [run.hit_rate for run in result.repeats if run.void is None]
        axes.scatter(each, [row] * len(each), s=16, color="white", edgecolors=_INK, linewidths=0.8, zorder=3)
    axes.set_yticks(range(len(policies)), list(policies))
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("share of prompt tokens served from cache; the upright line is the ideal")
    return _svg(figure, "hits")


def load_per_replica(policies: Mapping[str, PolicyResult]) -> str:
    """Prompt tokens each replica was given: computed in full colour, served from its cache pale."""
    rows = [(policy, replica) for policy, result in policies.items() for replica in result.replicas]
    figure, axes = _figure(0.8 + 0.36 * len(rows))
    palette = colours(list(policies))
    for row, (policy, replica) in enumerate(rows):
        share = policies[policy].replicas[replica]
        computed = share.prompt_tokens - share.cached_tokens
        axes.barh(row, computed, height=0.62, color=palette[policy])
        axes.barh(row, share.cached_tokens, left=computed, height=0.62, color=palette[policy], alpha=0.35)
        label = f"{share.requests} requests"
        axes.annotate(label, (share.prompt_tokens, row), (6, 0), textcoords="offset points", va="center", color=_INK)
    axes.set_yticks(range(len(rows)), [f"{policy}  {replica}" for policy, replica in rows])
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.16)
    axes.set_xlim(left=0)
    axes.set_xlabel("prompt tokens over all repeats: computed (full), from cache (pale)")
    return _svg(figure, "load")


def regrets(by_policy: Mapping[str, Sequence[float]]) -> str:
    """Share of decisions within a regret, log x; those without any stand at the left edge."""
    figure, axes = _figure(3.4)
    for policy, colour in colours(list(by_policy)).items():
        _cdf(axes, [max(_LEAST_MS, seconds * 1e3) for seconds in by_policy[policy]], color=colour, label=policy)
    axes.set_xscale("log")
    axes.set_xlabel("regret, ms (log)")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _plain_log_ticks(axes, "x")
    axes.legend(loc="lower right", frameon=False, labelcolor=_INK)
    return _svg(figure, "regrets")


def calibration(predicted_seconds: Sequence[float], actual_seconds: Sequence[float]) -> str:
    """Every first token, predicted against actual; on the line they are equal."""
    figure, axes = _figure(3.8)
    predicted, actual = ([max(_LEAST_MS, s * 1e3) for s in each] for each in (predicted_seconds, actual_seconds))
    extremes = (min(*predicted, *actual), max(*predicted, *actual))
    axes.scatter(predicted, actual, s=11, color=_PALETTE[0], alpha=0.55, linewidths=0)
    axes.plot(extremes, extremes, color=_INK, linewidth=1.2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("predicted, ms (log)")
    axes.set_ylabel("actual, ms (log)")
    for which in ("x", "y"):
        _plain_log_ticks(axes, which)
    return _svg(figure, "calibration")


def over_rates(rates: Sequence[RateResults]) -> str:
    """Left TTFT, mean (full) and p99 (dotted), log; right goodput. Between the extremes of the repeats it is shaded."""
    figure, (ttft, goodput) = _figures(3.2, 2)
    asked = [rate.rate for rate in rates]
    for policy, colour in colours(list(rates[0].policies)).items():
        results = [rate.policies[policy] for rate in rates]
        _curve(ttft, asked, [_spread(each, lambda run: run.ttft_ms.mean) for each in results], colour, label=policy)
        _curve(ttft, asked, [_spread(each, lambda run: run.ttft_ms.p99) for each in results], colour, linestyle=":")
        good = [_spread(each, lambda run: run.goodput) for each in results]
        scaled = [tuple(rate * value for value in values) for rate, values in zip(asked, good, strict=True)]
        _curve(goodput, asked, scaled, colour, label=policy)
    goodput.plot(asked, asked, color=_INK, linewidth=0.8, linestyle=(0, (1, 3)))
    goodput.set_ylim(bottom=0)
    goodput.set_ylabel("good requests/s (thin: all)")
    ttft.set_yscale("log")
    ttft.set_ylabel("time to first token, ms (log)")
    _plain_log_ticks(ttft, "y")
    for axes in (ttft, goodput):
        axes.set_xlabel("requests/s asked")
    goodput.legend(loc="upper left", frameon=False, labelcolor=_INK)
    return _svg(figure, "rates")


def _spread(result: PolicyResult, read: Callable[[Measured], float]) -> tuple[float, ...]:
    """The figure, and its extremes over the repeats that are not void."""
    each = [read(run) for run in result.repeats if run.void is None] or [read(result)]
    return read(result), min(each), max(each)


def _curve(axes: Axes, at: Sequence[float], values: Sequence[Sequence[float]], colour: str, **style: Any) -> None:
    middle, low, high = zip(*values, strict=True)
    axes.plot(at, middle, color=colour, marker="o", markersize=4, linewidth=1.8, **style)
    axes.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0)


def _figure(height_inches: float) -> tuple[Figure, Axes]:
    figure, (axes,) = _figures(height_inches, 1)
    return figure, axes


def _figures(height_inches: float, count: int) -> tuple[Figure, list[Axes]]:
    """Side by side."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
        return figure, [figure.add_subplot(1, count, number + 1) for number in range(count)]


def _ttfts(run: Run) -> list[float]:
    return [record.ttft_ms for record in run.records if record.ttft_ms is not None]


def _cdf(axes: Axes, values: Sequence[float], **style: Any) -> None:
    if values:
        axes.ecdf(values, **style)


def _plain_log_ticks(axes: Axes, which: str) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, which="major", axis="both")


def _svg(figure: Figure, name: str) -> str:
    """`name` goes before every id: several figures stand in one page."""
    target = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})
    drawing = target.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    for stands_for, colour in _PAGE_COLOURS.items():
        drawing = drawing.replace(stands_for, colour)
    drawing = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", drawing)
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", drawing)
    return re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" role="img">', drawing, count=1)
