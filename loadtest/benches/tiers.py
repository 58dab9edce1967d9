"""Where KV comes from fastest, by prompt length: computed, brought back from host memory, or still on the device.

    cold     nothing of the prompt is held             all of it is computed
    host     all of it was evicted to host memory      brought back before the step; the last tokens are computed
    device   all of it is there                        the last tokens are computed

One request at a time; the time is that of all steps up to its first token, transfers included, as the runner tells it:
measured with torch, from the cost model without. The crossover is the length from which bringing back wins.
"""

from __future__ import annotations

from random import Random

from loadtest.benches.bench_backend import bench_backend
from loadtest.benches.report import BenchReport, draw_lines
from loadtest.benches.spread import Spread
from replica.block_moves import carry_out
from replica.crossover import Crossover
from replica.prefix_cache import PrefixCache
from replica.runner import Runner
from replica.scheduler import Scheduler
from replica.sequence import SamplingParams, Sequence
from replica.step_meter import StepMeter
from shared.blocks import namespace_root
from shared.settings import BenchSettings

__all__ = ["run"]

_TOKEN_BUDGET = 512
_SHORTEST_TOKENS = 32
_LONGEST_TOKENS = 4096
_WAYS = ("cold", "host", "device")
_ROOT = namespace_root("bench")


class _Rig:
    """An engine without threads, whose pool holds one of the prompts, and its host pool another."""

    def __init__(self, runner: Runner, block_size: int, vocabulary: int, seed: int) -> None:
        self._runner = runner
        self._meter = StepMeter()
        self.crossover = Crossover(block_size, self._meter.coefficients)
        self._cache = PrefixCache(runner.num_blocks, block_size, host_blocks=runner.host_blocks)
        self._scheduler = Scheduler(self._cache, _TOKEN_BUDGET, max_running=1, max_waiting=1)
        self._rng = Random(seed)
        self._vocabulary = vocabulary
        self._requests = 0

    def seconds_to_first_token(self, prompt: list[int]) -> float:
        self._requests += 1
        request = Sequence(f"b{self._requests}", list(prompt), len(prompt), SamplingParams(max_tokens=1), _ROOT)
        self._scheduler.add(request)
        seconds = 0.0
        while self._scheduler.has_work:
            chunks = self._scheduler.schedule()
            transferred = carry_out(self._runner, self._cache.take_moves())
            result = self._runner.execute(chunks)
            self._scheduler.commit(chunks, result)
            self._meter.observe(chunks, result.seconds)
            self.crossover.observe(transferred)
            # What was evicted on the way is the price of whoever filled the pool, on every way alike.
            seconds += transferred.onload_seconds + result.seconds
        return seconds

    def prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(self._vocabulary) for _ in range(tokens)]

    def measure(self, tokens: int) -> dict[str, float]:
        self._cache.reset()
        prompt = self.prompt(tokens)
        cold = self.seconds_to_first_token(prompt)
        device = self.seconds_to_first_token(prompt)
        self._push_out()
        held = self._cache.match(Sequence("look", prompt, tokens, SamplingParams(max_tokens=1), _ROOT))
        assert len(held.host_keys) == (tokens - 1) // self._cache.block_size, "all of it has moved to host memory"
        return {"cold": cold, "host": self.seconds_to_first_token(prompt), "device": device}

    def _push_out(self) -> None:
        """Move all that is cached to host memory."""
        filler = self.prompt(self._cache.num_blocks * self._cache.block_size)
        request = Sequence("filler", filler, len(filler), SamplingParams(max_tokens=1), _ROOT)
        assert self._cache.allocate(request, self._cache.match(request)), "an idle pool has room for all of itself"
        carry_out(self._runner, self._cache.take_moves())
        self._cache.free(request)


def run(settings: BenchSettings, report: BenchReport) -> None:
    block_size = settings.block_size
    longest_blocks = _LONGEST_TOKENS // block_size + 2
    backend = bench_backend(settings, longest_blocks, 2 * longest_blocks)
    runner = backend.runner
    lengths = _lengths(min(_LONGEST_TOKENS, backend.context_tokens - 1), block_size)
    rig = _Rig(runner, block_size, vocabulary=1_000, seed=settings.seed)
    for tokens in lengths:  # caches of processor and allocator warm up, kernels are chosen
        rig.measure(tokens)
    measured = {tokens: [rig.measure(tokens) for _ in range(settings.repeats)] for tokens in lengths}
    times = {
        tokens: {way: Spread.of([repeat[way] for repeat in repeats]) for way in _WAYS}
        for tokens, repeats in measured.items()
    }
    losing = [tokens for tokens in lengths if times[tokens]["host"].median >= times[tokens]["cold"].median]
    crossover = next((tokens for tokens in lengths if tokens > max(losing, default=0)), None)
    rows = [
        (str(tokens), *(times[tokens][way].shown(_milliseconds) for way in _WAYS), _faster(times[tokens]))
        for tokens in lengths
    ]
    report.table(
        f"Milliseconds to the first token: {backend.replica_class}, blocks of {block_size}",
        ("prompt tokens", *_WAYS, "host against cold"),
        rows,
    )
    report.say(_conclusion(crossover, rig.crossover.onload_seconds_per_token))
    lines = {way: [_point(tokens, times[tokens][way]) for tokens in lengths] for way in _WAYS}
    report.write(
        {
            "setup": {"class": backend.replica_class, "block_size": block_size, "repeats": settings.repeats},
            "crossover_tokens": crossover,
            "onload_seconds_per_token": rig.crossover.onload_seconds_per_token,
            "seconds": {str(tokens): ways for tokens, ways in times.items()},
        },
        [lambda axes: draw_lines(axes, lines, "To the first token", "prompt tokens", "milliseconds", log_y=True)],
    )


def _point(tokens: int, seconds: Spread) -> tuple[float, float, float, float]:
    return tokens, 1e3 * seconds.median, 1e3 * seconds.least, 1e3 * seconds.most


def _lengths(longest: int, block_size: int) -> list[int]:
    lengths = []
    tokens = max(_SHORTEST_TOKENS, 2 * block_size)
    while tokens < longest:
        lengths.append(tokens + 1)  # the last token is computed in any case
        tokens *= 2
    return lengths


def _conclusion(crossover: int | None, seconds_per_token: float | None) -> str:
    rate = "" if seconds_per_token is None else f" ({1e6 * seconds_per_token:.2f} microseconds a token)"
    if crossover is None:
        return f"Bringing KV back{rate} does not beat computing it at the lengths tried."
    return f"From {crossover} prompt tokens on, bringing KV back{rate} beats computing it."


def _faster(ways: dict[str, Spread]) -> str:
    return f"{ways['cold'].median / ways['host'].median:.1f} x"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
