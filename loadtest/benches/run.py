"""`warmroute bench`: which benches there are, and one or all quick ones of them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import NamedTuple

from rich.console import Console

from replica.backend import BackendError
from shared.settings import BENCH_NAMES, BenchSettings

__all__ = ["run"]


_LOG_WIDTH = 140


class _Bench(NamedTuple):
    help: str
    quick: bool
    """Needs no model, and is part of `warmroute bench` without a name."""


_BENCHES = {
    "cache": _Bench("hit rates of chat traffic by capacity, order of eviction and block size", quick=True),
    "pool": _Bench("microseconds of the block books: match, allocate, free", quick=True),
    "index": _Bench("microseconds of a decision and of the router's index, bytes a key", quick=True),
    "tiers": _Bench("time to first token computed, from host memory and from the device, by length", quick=False),
    "prefill": _Bench("time to first token and tokens computed behind a cached prefix, by its length", quick=False),
    "engine": _Bench("the engine beside transformers' generate, with and without something to reuse", quick=False),
}
assert tuple(_BENCHES) == BENCH_NAMES, "the command line offers the benches that there are"


def run(settings: BenchSettings) -> int:
    if importlib.util.find_spec("matplotlib") is None:
        stderr = Console(stderr=True)
        stderr.print("warmroute bench: it needs matplotlib: pip install 'warmroute\\[loadtest]'", soft_wrap=True)
        return 1
    from loadtest.benches.report import BenchReport

    console = Console()
    if not console.is_terminal:  # a log has room for whole tables
        console = Console(width=_LOG_WIDTH)
    names = [settings.name] if settings.name else [name for name, bench in _BENCHES.items() if bench.quick]
    try:
        for name in names:
            console.rule(f"[bold]{name}[/]: {_BENCHES[name].help}", align="left")
            importlib.import_module(f"loadtest.benches.{name}").run(settings, BenchReport(name, settings.out, console))
    except (BackendError, OSError) as error:
        Console(stderr=True).print(f"warmroute bench: {error}", markup=False, soft_wrap=True)
        return 1
    if not settings.name:
        others = ", ".join(f"{name} ({bench.help})" for name, bench in _BENCHES.items() if not bench.quick)
        console.print(f"By name only: {others}", highlight=False)
    return 0
