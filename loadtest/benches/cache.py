"""What a prefix cache makes of chat traffic: by capacity, by order of eviction, and by how fine it matches.

Requests come one at a time, so that nothing but the cache decides. Ours is the replica's own `PrefixCache`; beside it
stands a plain LRU over the same blocks, as caches have it that do not know that a block is worth nothing without what
it continues. Of a system prompt that has not been asked for lately it gives up the first block first, and with that
all of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loadtest.benches.chat_tokens import ChatShape, Turn, chat, shared_prefixes
from loadtest.benches.report import BenchReport, Lines, draw_lines
from loadtest.benches.spread import Spread
from replica.prefix_cache import PrefixCache
from replica.sequence import SamplingParams
from replica.sequence import Sequence as Request
from shared.blocks import BlockKey, block_keys, namespace_root
from shared.settings import BenchSettings

__all__ = ["run"]

_BLOCK_SIZE = 16
_CHAT_BLOCKS = (16_000, 4_000, 2_000, 1_000, 500, 320)
_LONG_PROMPTS = 8
_LONG_PROMPT_TOKENS = 2_000
_LONG_PROMPT_BLOCKS = (1_500, 1_200, 1_000, 800, 600, 400, 250)
_BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
_PREFIX_TOKENS = (24, 60, 120, 250, 500)
_LARGE_BLOCK = 256
_OURS = "leaf-only LRU"
_ROOT = namespace_root("bench")

Sweep = dict[str, list[dict[str, Any]]]
"""By cache, what was measured at each capacity."""


class Cache(Protocol):
    @property
    def evicted_blocks(self) -> int: ...

    def serve(self, turn: Turn) -> tuple[int, int]:
        """(whole blocks found, tokens found)."""
        ...


class ReplicaCache:
    """The replica's own."""

    def __init__(self, num_blocks: int, block_size: int, *, finer: bool = False, host_blocks: int = 0) -> None:
        self._cache = PrefixCache(num_blocks, block_size, finer=finer, host_blocks=host_blocks)

    @property
    def evicted_blocks(self) -> int:
        evictions = self._cache.evictions
        return evictions["capacity"] + evictions["to_host"]

    def serve(self, turn: Turn) -> tuple[int, int]:
        prompt, answer = turn
        request = Request("bench", list(prompt), len(prompt), SamplingParams(max_tokens=len(answer)), _ROOT)
        cache = self._cache
        assert cache.allocate(request, cache.match(request)), "the pool holds one request at least"
        found = request.registered_blocks, request.computed_tokens
        request.tokens += answer
        assert cache.grow(request), "the pool holds one request at least"
        request.computed_tokens = len(request.tokens) - 1  # nobody computes the last token of an answer
        cache.register(request)
        cache.free(request)
        cache.take_moves()
        return found


class PlainLru:
    """Blocks by their key, least recently used first, each for itself."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.evicted_blocks = 0
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._held: OrderedDict[BlockKey, None] = OrderedDict()

    def serve(self, turn: Turn) -> tuple[int, int]:
        size = self._block_size
        usable = (len(turn.prompt) - 1) // size
        keys = block_keys(_ROOT, [*turn.prompt, *turn.answer[:-1]], size)
        hit = next((n for n, key in enumerate(keys[:usable]) if key not in self._held), usable)
        for key in keys:
            self._held[key] = None
            self._held.move_to_end(key)
        while len(self._held) > self._num_blocks:
            self._held.popitem(last=False)
            self.evicted_blocks += 1
        return hit, hit * size


@dataclass(slots=True)
class Tally:
    """What one cache did with one workload."""

    blocks: int = 0
    hit_blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0

    @property
    def block_hit_rate(self) -> float:
        return self.hit_blocks / self.blocks

    @property
    def reused_share(self) -> float:
        return self.hit_tokens / self.tokens


def play(cache: Cache, turns: Iterable[Turn], block_size: int) -> Tally:
    tally = Tally()
    for turn in turns:
        hit_blocks, hit_tokens = cache.serve(turn)
        tally.blocks += len(turn.prompt) // block_size
        tally.hit_blocks += hit_blocks
        tally.tokens += len(turn.prompt)
        tally.hit_tokens += hit_tokens
    tally.evicted_blocks = cache.evicted_blocks
    return tally


def run(settings: BenchSettings, report: BenchReport) -> None:
    seeds = range(settings.seed, settings.seed + settings.repeats)
    chats = [list(chat(ChatShape(), seed)) for seed in seeds]
    prompts = [list(shared_prefixes(_LONG_PROMPT_TOKENS, 80, _LONG_PROMPTS, 400, seed)) for seed in seeds]
    chat_sweep, prompt_sweep = _sweep(chats, _CHAT_BLOCKS), _sweep(prompts, _LONG_PROMPT_BLOCKS)
    sizes, prefixes = _by_block_size(chats), _by_prefix(seeds)
    ample = chat_sweep[_OURS][0]
    report.say(
        f"Chat with room for everything: {_percent(ample['block_hit_rate'])} of the blocks are found, "
        f"{_percent(ample['reused_share'])} of the prompt tokens reused.\n"
        f"{settings.repeats} workloads of {len(chats[0])} requests each; in brackets the least and the most."
    )
    _show_sweep(report, "Chat with one system prompt", chat_sweep)
    _show_sweep(
        report, f"{_LONG_PROMPTS} system prompts of {_LONG_PROMPT_TOKENS} tokens, one question each", prompt_sweep
    )
    _show_finer(report, "Prompt tokens reused, chat", "block size", sizes)
    _show_finer(report, f"Prompt tokens reused, short shared prefixes, blocks of {_LARGE_BLOCK}", "prefix", prefixes)
    report.write(
        {
            "setup": {"repeats": settings.repeats, "seed": settings.seed, "block_size": _BLOCK_SIZE},
            "chat": chat_sweep,
            "long_system_prompts": prompt_sweep,
            "by_block_size": sizes,
            "by_prefix_tokens": prefixes,
        },
        [
            lambda axes: draw_lines(axes, _sweep_lines(chat_sweep), "Chat: block hits", "blocks", "share"),
            lambda axes: draw_lines(axes, _sweep_lines(prompt_sweep), "Long prompts: block hits", "blocks", "share"),
            lambda axes: draw_lines(axes, _lines(sizes), "Chat: tokens reused", "block size", "share"),
            lambda axes: draw_lines(
                axes, _lines(prefixes), f"Blocks of {_LARGE_BLOCK}: tokens reused", "shared prefix, tokens", "share"
            ),
        ],
    )


def _sweep(workloads: Sequence[list[Turn]], capacities: Sequence[int]) -> Sweep:
    caches: dict[str, Callable[[int], Cache]] = {
        _OURS: lambda blocks: ReplicaCache(blocks, _BLOCK_SIZE),
        "plain LRU": lambda blocks: PlainLru(blocks, _BLOCK_SIZE),
    }
    return {
        name: [
            _measured(blocks, [play(make(blocks), turns, _BLOCK_SIZE) for turns in workloads]) for blocks in capacities
        ]
        for name, make in caches.items()
    }


def _measured(blocks: int, tallies: Sequence[Tally]) -> dict[str, Any]:
    return {
        "capacity_blocks": blocks,
        "block_hit_rate": Spread.of([tally.block_hit_rate for tally in tallies]),
        "reused_share": Spread.of([tally.reused_share for tally in tallies]),
        "evicted_blocks": Spread.of([tally.evicted_blocks for tally in tallies]),
    }


def _by_block_size(workloads: Sequence[list[Turn]]) -> dict[str, dict[str, Spread]]:
    def measure(block_size: int, finer: bool) -> Spread:
        tallies = [play(_ample(turns, block_size, finer), turns, block_size) for turns in workloads]
        return Spread.of([tally.reused_share for tally in tallies])

    return _whole_and_finer({str(size): size for size in _BLOCK_SIZES}, measure)


def _by_prefix(seeds: Sequence[int]) -> dict[str, dict[str, Spread]]:
    def measure(prefix_tokens: int, finer: bool) -> Spread:
        workloads = [list(shared_prefixes(prefix_tokens, 80, groups=8, requests=400, seed=seed)) for seed in seeds]
        tallies = [play(_ample(turns, _LARGE_BLOCK, finer), turns, _LARGE_BLOCK) for turns in workloads]
        return Spread.of([tally.reused_share for tally in tallies])

    return _whole_and_finer({str(tokens): tokens for tokens in _PREFIX_TOKENS}, measure)


def _whole_and_finer(steps: dict[str, int], measure: Callable[[int, bool], Spread]) -> dict[str, dict[str, Spread]]:
    return {
        "whole blocks": {name: measure(step, False) for name, step in steps.items()},
        "parts of blocks too": {name: measure(step, True) for name, step in steps.items()},
    }


def _ample(turns: Sequence[Turn], block_size: int, finer: bool) -> ReplicaCache:
    blocks = sum(-(-(len(turn.prompt) + len(turn.answer)) // block_size) for turn in turns)
    return ReplicaCache(blocks, block_size, finer=finer)


def _show_sweep(report: BenchReport, title: str, sweep: Sweep) -> None:
    rows = [
        (
            f"{ours['capacity_blocks']:,}",
            *(_percent(row["block_hit_rate"]) for row in (ours, plain)),
            *(_percent(row["reused_share"]) for row in (ours, plain)),
            ours["evicted_blocks"].shown(lambda blocks: f"{blocks:,.0f}"),
        )
        for ours, plain in zip(*sweep.values(), strict=True)
    ]
    names = [f"{what}, {name}" for what in ("block hits", "tokens reused") for name in sweep]
    report.table(title, ("capacity", *names, "evicted blocks"), rows)


def _show_finer(report: BenchReport, title: str, step: str, found: dict[str, dict[str, Spread]]) -> None:
    whole, finer = found.values()
    report.table(title, (step, *found), [(name, _percent(whole[name]), _percent(finer[name])) for name in whole])


def _sweep_lines(sweep: Sweep) -> Lines:
    return {name: [(row["capacity_blocks"], *row["block_hit_rate"]) for row in rows] for name, rows in sweep.items()}


def _lines(found: dict[str, dict[str, Spread]]) -> Lines:
    return {
        label: [(float(name), spread.median, spread.least, spread.most) for name, spread in steps.items()]
        for label, steps in found.items()
    }


def _percent(spread: Spread) -> str:
    return spread.shown(lambda share: f"{share:.1%}")
