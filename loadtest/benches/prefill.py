"""What a cached prefix spares, by its length: tokens computed, and time to the first token.

    no cache    every request in a namespace of its own: nothing of it is ever held      all of it is computed
    cold        the first request with this prefix                                       all of it is computed
    warm        the next one, which asks something else behind the same prefix           the rest is computed

And what follows from it: the time of a warm request is that of its uncached tokens, whatever stands before them. One
request at a time. The time is that of all steps up to the first token, as the runner tells it: measured with torch,
from the cost model without. The three ways take turns.
"""

from __future__ import annotations

from itertools import product
from random import Random
from typing import NamedTuple

from loadtest.benches.bench_backend import bench_backend
from loadtest.benches.report import BenchReport, draw_lines
from loadtest.benches.spread import Spread
from loadtest.benches.stepped_engine import Served, SteppedEngine
from shared.blocks import namespace_root
from shared.settings import BenchSettings

__all__ = ["run"]

_PREFIX_TOKENS = (64, 128, 256, 512, 1024, 2048)
_QUESTION_TOKENS = 64
_BEFORE_TOKENS = (0, 512, 1024)
_UNCACHED_TOKENS = (32, 64, 128, 256, 512)
_WAYS = ("no cache", "cold", "warm")
_VOCABULARY = 1_000


class _Figures(NamedTuple):
    computed_tokens: int
    seconds: Spread


def run(settings: BenchSettings, report: BenchReport) -> None:
    block_size = settings.block_size
    # Room for a prefix, both of its questions, and the same once more without a cache.
    blocks = 2 * (_PREFIX_TOKENS[-1] + 2 * _QUESTION_TOKENS) // block_size + 4
    backend = bench_backend(settings, blocks)
    runner = backend.runner
    engine, rng = SteppedEngine(runner), Random(settings.seed)
    lengths = [tokens for tokens in _PREFIX_TOKENS if tokens + _QUESTION_TOKENS < backend.context_tokens]
    for tokens in lengths:  # caches of processor and allocator warm up, kernels are chosen
        _measure(engine, rng, tokens)
    rounds = [{tokens: _measure(engine, rng, tokens) for tokens in lengths} for _ in range(settings.repeats)]
    figures = {
        tokens: {
            way: _Figures(
                rounds[0][tokens][way].computed_tokens, Spread.of([each[tokens][way].step_seconds for each in rounds])
            )
            for way in _WAYS
        }
        for tokens in lengths
    }
    report.table(
        f"Before the first token: {backend.replica_class}, {_QUESTION_TOKENS} tokens behind a prefix, ms",
        ("prefix tokens", *_WAYS, "computed: no cache", "cold", "warm", "warm against cold"),
        [
            (
                str(tokens),
                *(ways[way].seconds.shown(_milliseconds) for way in _WAYS),
                *(str(ways[way].computed_tokens) for way in _WAYS),
                f"{ways['cold'].seconds.median / ways['warm'].seconds.median:.1f} x",
            )
            for tokens, ways in figures.items()
        ],
    )
    lines = {way: [_point(tokens, figures[tokens][way].seconds) for tokens in lengths] for way in _WAYS}
    before = [tokens for tokens in _BEFORE_TOKENS if tokens + _UNCACHED_TOKENS[-1] < backend.context_tokens]
    behind = _measure_uncached(engine, rng, before, settings.repeats)
    report.table(
        "By uncached tokens, ms",
        ("uncached tokens", *(f"behind {tokens} cached" for tokens in before)),
        [
            (str(uncached), *(behind[tokens][uncached].shown(_milliseconds) for tokens in before))
            for uncached in _UNCACHED_TOKENS
        ],
    )
    uncached_lines = {
        f"behind {tokens} cached": [_point(uncached, spread) for uncached, spread in by_uncached.items()]
        for tokens, by_uncached in behind.items()
    }
    report.write(
        {
            "setup": {"class": backend.replica_class, "block_size": block_size, "repeats": settings.repeats},
            "prefixes": {
                str(tokens): {way: each._asdict() for way, each in ways.items()} for tokens, ways in figures.items()
            },
            "seconds_by_cached_and_uncached": behind,
        },
        [
            lambda axes: draw_lines(axes, lines, "To the first token", "prefix tokens", "milliseconds"),
            lambda axes: draw_lines(axes, uncached_lines, "Warm", "uncached tokens", "milliseconds"),
        ],
    )


def _measure_uncached(
    engine: SteppedEngine, rng: Random, before: list[int], repeats: int
) -> dict[int, dict[int, Spread]]:
    """Seconds by cached and by uncached tokens."""
    measured: dict[tuple[int, int], list[float]] = {}
    for _ in range(repeats):
        for cached, uncached in product(before, _UNCACHED_TOKENS):
            engine.cache.reset()
            prefix = _random_tokens(rng, cached)
            if prefix:
                engine.serve([prefix], 1)
            served = engine.serve([prefix + _random_tokens(rng, uncached)], 1)
            measured.setdefault((cached, uncached), []).append(served.step_seconds)
    return {
        cached: {uncached: Spread.of(measured[cached, uncached]) for uncached in _UNCACHED_TOKENS} for cached in before
    }


def _measure(engine: SteppedEngine, rng: Random, prefix_tokens: int) -> dict[str, Served]:
    engine.cache.reset()
    prefix, first, second = (
        _random_tokens(rng, tokens) for tokens in (prefix_tokens, _QUESTION_TOKENS, _QUESTION_TOKENS)
    )
    return {
        "no cache": engine.serve([prefix + first], 1, namespace_root(str(rng.random()))),
        "cold": engine.serve([prefix + first], 1),
        "warm": engine.serve([prefix + second], 1),
    }


def _random_tokens(rng: Random, count: int) -> list[int]:
    return [rng.randrange(_VOCABULARY) for _ in range(count)]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def _point(tokens: int, seconds: Spread) -> tuple[float, float, float, float]:
    return tokens, 1e3 * seconds.median, 1e3 * seconds.least, 1e3 * seconds.most
