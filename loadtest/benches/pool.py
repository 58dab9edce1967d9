"""What the books of the KV blocks cost: match, allocate and free of a long cached sequence in a large pool."""

from __future__ import annotations

import time
from collections.abc import Callable

from loadtest.benches.report import BenchReport, draw_lines
from loadtest.benches.spread import Spread
from replica.prefix_cache import PrefixCache
from replica.sequence import SamplingParams, Sequence
from shared.blocks import namespace_root
from shared.settings import BenchSettings

__all__ = ["run"]

_POOL_BLOCKS = 100_000
_BLOCK_SIZE = 16
_SEQUENCE_BLOCKS = (125, 500, 2_000)
_TIMES = 20
"""In each repeat; the median of these is one measurement."""
_ROOT = namespace_root("bench")

_KINDS: dict[str, Callable[[], PrefixCache]] = {
    "whole blocks": lambda: PrefixCache(_POOL_BLOCKS, _BLOCK_SIZE),
    "parts, two tiers": lambda: PrefixCache(_POOL_BLOCKS, _BLOCK_SIZE, finer=True, host_blocks=_POOL_BLOCKS),
}


def run(settings: BenchSettings, report: BenchReport) -> None:
    results: dict[str, dict[str, dict[str, Spread]]] = {}
    for kind, make in _KINDS.items():
        cache = make()
        _fill(cache)
        results[kind] = {
            str(blocks): _measure(cache, blocks, settings.repeats, first_token=blocks) for blocks in _SEQUENCE_BLOCKS
        }
    columns = ("sequence", "cache", "match", "allocate", "free", "together", "a block")
    rows = [
        (
            f"{blocks} blocks",
            kind,
            *(spread.shown(lambda seconds: f"{1e6 * seconds:,.0f}") for spread in operations.values()),
            f"{1e9 * operations['together'].median / int(blocks):,.0f} ns",
        )
        for kind, by_blocks in results.items()
        for blocks, operations in by_blocks.items()
    ]
    report.table(f"A cached sequence in a full pool of {_POOL_BLOCKS:,} blocks, microseconds", columns, rows)

    lines = {
        kind: [_point(int(blocks), operations["together"]) for blocks, operations in by_blocks.items()]
        for kind, by_blocks in results.items()
    }
    report.write(
        {"setup": {"pool_blocks": _POOL_BLOCKS, "block_size": _BLOCK_SIZE}, "seconds": results},
        [lambda axes: draw_lines(axes, lines, "Match, allocate and free", "blocks of the sequence", "microseconds")],
    )


def _point(blocks: int, seconds: Spread) -> tuple[float, float, float, float]:
    return blocks, 1e6 * seconds.median, 1e6 * seconds.least, 1e6 * seconds.most


def _fill(cache: PrefixCache) -> None:
    """The whole pool with cached blocks, so that every new block evicts one."""
    for number in range(_POOL_BLOCKS // 1_000):
        _remember(cache, [number, *range(1, 1_000 * _BLOCK_SIZE)])


def _measure(cache: PrefixCache, blocks: int, repeats: int, first_token: int) -> dict[str, Spread]:
    prompt = [_POOL_BLOCKS + first_token, *range(1, blocks * _BLOCK_SIZE + 1)]
    _remember(cache, prompt)
    medians: dict[str, list[float]] = {"match": [], "allocate": [], "free": [], "together": []}
    for _ in range(repeats):
        times = sorted(_once(cache, prompt) for _ in range(_TIMES))
        for name, seconds in zip(medians, times[_TIMES // 2], strict=True):
            medians[name].append(seconds)
    return {name: Spread.of(values) for name, values in medians.items()}


def _once(cache: PrefixCache, prompt: list[int]) -> tuple[float, float, float, float]:
    request = _request(prompt)
    cache.match(request)  # hashes the keys: once for each request, whatever it meets
    began = time.perf_counter()
    match = cache.match(request)
    matched = time.perf_counter()
    cache.allocate(request, match)
    allocated = time.perf_counter()
    cache.free(request)
    freed = time.perf_counter()
    cache.take_moves()
    return matched - began, allocated - matched, freed - allocated, freed - began


def _remember(cache: PrefixCache, prompt: list[int]) -> None:
    request = _request(prompt)
    assert cache.allocate(request, cache.match(request)), "the pool is larger than any sequence here"
    request.computed_tokens = len(request.tokens)
    cache.register(request)
    cache.free(request)
    cache.take_moves()


def _request(prompt: list[int]) -> Sequence:
    return Sequence("bench", list(prompt), len(prompt), SamplingParams(max_tokens=1), _ROOT)
