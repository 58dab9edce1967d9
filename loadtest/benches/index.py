"""What a decision costs the router, and what its index of cached blocks takes: microseconds of CPU, and bytes a key."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import NamedTuple

from loadtest.benches.report import BenchReport, draw_lines
from loadtest.benches.spread import Spread
from router.block_index import BlockIndex
from router.fleet import Fleet, FleetReplica
from router.placement import Placement
from router.policies import build_policy
from router.policies.base import Request
from shared.blocks import PublishedKey
from shared.fleet_records import CostCoefficients, ReplicaLoad, ReplicaRecord
from shared.settings import BenchSettings

__all__ = ["run"]

_BLOCK_SIZE = 16
_INDEX_KEYS = (10_000, 100_000, 1_000_000)
_LOOKED_UP_BLOCKS = 8_000
_UNDER_WAY = 2
"""Requests at each replica, one of them past its first token."""
_TIMES = 100
"""In each repeat; their mean is one measurement."""


class _Fleet(NamedTuple):
    replicas: int
    prompt_blocks: int
    depths: Callable[[int, int], int]
    """(replica's number, blocks of the prompt) -> how many of them it holds."""


_FLEETS = {
    "4 replicas, 30 blocks": _Fleet(4, 30, lambda number, blocks: 20 if number == 0 else 0),
    "64 replicas, 8,000 blocks": _Fleet(64, 8_000, lambda number, blocks: (6_000, 2_000, 500, 0)[number % 4]),
    "64 replicas, each with another depth": _Fleet(64, 8_000, lambda number, blocks: number * blocks // 64 + number),
}


def run(settings: BenchSettings, report: BenchReport) -> None:
    rng = random.Random(settings.seed)
    decisions = {name: _decisions(fleet, settings.repeats, rng) for name, fleet in _FLEETS.items()}
    report.table(
        f"A decision with {_UNDER_WAY} requests under way at every replica, microseconds",
        ("fleet and prompt", "decide"),
        [(name, seconds.shown(_microseconds)) for name, seconds in decisions.items()],
    )
    lookups: dict[int, Spread] = {}
    sizes: dict[int, float] = {}
    for keys in _INDEX_KEYS:
        index, prompt, sizes[keys] = _index_of(keys, rng)
        lookups[keys] = _timed(lambda index=index, prompt=prompt: index.held_prefixes(prompt), settings.repeats)  # type: ignore[misc]
    report.table(
        f"A prompt of {_LOOKED_UP_BLOCKS:,} blocks looked up among the keys of 64 replicas",
        ("keys", "microseconds", "bytes a key"),
        [(f"{keys:,}", lookups[keys].shown(_microseconds), f"{sizes[keys]:,.0f}") for keys in _INDEX_KEYS],
    )
    line = [(keys, 1e6 * each.median, 1e6 * each.least, 1e6 * each.most) for keys, each in lookups.items()]
    report.write(
        {
            "setup": {"block_size": _BLOCK_SIZE, "under_way": _UNDER_WAY, "looked_up_blocks": _LOOKED_UP_BLOCKS},
            "decide_seconds": decisions,
            "lookup_seconds": lookups,
            "bytes_per_key": sizes,
        },
        [lambda axes: draw_lines(axes, {"lookup": line}, "Held prefixes of 64 replicas", "keys", "microseconds")],
    )


def _decisions(fleet: _Fleet, repeats: int, rng: random.Random) -> Spread:
    index, replicas = BlockIndex(), _replicas(fleet.replicas)
    placement = Placement(index, build_policy("cache-aware"), build_policy("consistent-hash"))
    keys = _keys(fleet.prompt_blocks, rng)
    for number, replica in enumerate(replicas):
        index.apply(replica.id, keys[: fleet.depths(number, len(keys))])
    for number in range(_UNDER_WAY * len(replicas)):
        replica = replicas[number % len(replicas)]
        others = [other.id for other in replicas if other is not replica]
        request = _request(_keys(30, rng))
        attempt = placement.dispatch(
            request, replica, placement.decide(request, replicas, 0.0, excluded=others), now=0.0
        )
        if number < len(replicas):
            placement.first_token(attempt, 0.01, 0)
    asked = _request(keys)
    now = 0.01

    def decide() -> None:
        nonlocal now
        now += 1e-3
        placement.decide(asked, replicas, now)

    return _timed(decide, repeats)


def _index_of(keys: int, rng: random.Random) -> tuple[BlockIndex, Sequence[PublishedKey], float]:
    """64 replicas that share the work of holding so many; one of them holds half of the prompt. And bytes a key."""
    prompt = _keys(_LOOKED_UP_BLOCKS, rng)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = BlockIndex()
    index.apply("r0", prompt[: _LOOKED_UP_BLOCKS // 2])
    for number in range(64):
        index.apply(f"r{number}", _keys((keys - _LOOKED_UP_BLOCKS // 2) // 64, rng))
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return index, prompt, taken / len(index)


def _timed(act: Callable[[], object], repeats: int) -> Spread:
    means = []
    for _ in range(repeats):
        began = time.thread_time()
        for _ in range(_TIMES):
            act()
        means.append((time.thread_time() - began) / _TIMES)
    return Spread.of(means)


def _replicas(count: int) -> list[FleetReplica]:
    fleet = Fleet()
    return [fleet.update(_record(f"r{number}"), 0.0) for number in range(count)]


def _record(replica_id: str) -> ReplicaRecord:
    return ReplicaRecord(
        id=replica_id,
        url="http://127.0.0.1:1",
        model="bench",
        fingerprint="bench",
        golden_key="",
        golden_prompt_key="",
        tokenizer="bench",
        block_size=_BLOCK_SIZE,
        context_tokens=1 << 20,
        capacity_blocks=100_000,
        load=ReplicaLoad(running=2, free_blocks=50_000, evictable_blocks=40_000),
        cost=CostCoefficients(0.008, 5e-5, 1e-9),
    )


def _keys(count: int, rng: random.Random) -> list[PublishedKey]:
    return [PublishedKey(rng.getrandbits(64)) for _ in range(count)]


def _request(keys: list[PublishedKey]) -> Request:
    return Request(prompt_tokens=len(keys) * _BLOCK_SIZE + 5, keys=keys, block_size=_BLOCK_SIZE)


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f}"
