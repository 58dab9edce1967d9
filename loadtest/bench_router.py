"""`warmroute bench router`: what a request costs in the router, side by side with others, over the same replicas.

    load generator --> a contestant --> replicas that answer at once      each a process of its own
          `----------- direct ----------------^

Contestants take turns, in another order each round, so that a machine whose speed drifts drifts for all. CPU time is
the contestant's own, its children included, and says more than requests per second where processors are shared.
"""

from __future__ import annotations

import json
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from loadtest.bench_hold import longest_wait_seconds
from loadtest.bench_load import Figures, Job
from loadtest.bench_upstreams import CHUNKS
from loadtest.peers import PeerError, program_name, running_peer, started
from loadtest.process_figures import resident_bytes
from shared.embedded_redis import EmbeddedRedisError, find_or_start
from shared.settings import BenchRouterSettings

__all__ = ["run"]

_READY_SECONDS = 30.0
_RUN_SECONDS = 600.0
_SETTLE_SECONDS = 1.5
"""For whoever asks its replicas first whether they are well."""
_OPEN_LOOP_REQUESTS = 1500
_STREAM_CONNECTIONS = 200
_LONG_PROMPT_TOKENS, _LONG_PROMPTS, _LONG_CONNECTIONS = 128_000, 8, 2
_LONG_PROMPTS_PER_SECOND = 2.0
_SOAK_STEP, _SOAK_SEED = 20_000, 10_000
_MIB = 2**20


class _BenchError(Exception):
    """The bench cannot be run. The message says why."""


@dataclass
class _Contestant:
    name: str
    urls: list[str]
    pid: int | None
    measured: dict[str, list[float]] = field(default_factory=dict)
    failed: int = 0

    def note(self, figure: str, value: float) -> None:
        self.measured.setdefault(figure, []).append(value)


class _Row(NamedTuple):
    figure: str
    form: str


_ROWS = {
    "CPU us / request": _Row("cpu_us", "{:,.0f}"),
    "requests / s": _Row("per_second", "{:,.0f}"),
    "added p50 ms": _Row("added_p50_ms", "{:.2f}"),
    "added p99 ms": _Row("added_p99_ms", "{:.2f}"),
    "p99 ms": _Row("p99_ms", "{:.2f}"),
    "p99 ms among long prompts": _Row("among_long_p99_ms", "{:.2f}"),
    "CPU us / stream": _Row("stream_cpu_us", "{:,.0f}"),
    "us / chunk": _Row("chunk_us", "{:.1f}"),
    "longest hold ms": _Row("hold_ms", "{:,.1f}"),
    "memory MiB": _Row("memory_mib", "{:,.0f}"),
    "grown MiB": _Row("grown_mib", "{:+,.0f}"),
    "grown in soak MiB": _Row("soak_mib", "{:+,.1f}"),
}


def run(settings: BenchRouterSettings) -> int:
    """0 when every request was answered, 1 where some were not or the bench could not be run."""
    console, errors = Console(), Console(stderr=True)
    try:
        with ExitStack() as stack:
            contestants = _start(settings, stack)
            for number in range(settings.repeats):
                for contestant in contestants[number % len(contestants) :] + contestants[: number % len(contestants)]:
                    errors.print(f"round {number + 1} of {settings.repeats}: {contestant.name}", markup=False)
                    _measure(contestant, settings, seed=1 + number)
                _add_latencies(contestants)
            if settings.soak_requests:
                for contestant in contestants[1:]:
                    errors.print(f"{settings.soak_requests:,} more requests: {contestant.name}", markup=False)
                    _soak(contestant, settings)
    except (_BenchError, EmbeddedRedisError, PeerError) as error:
        errors.print(f"warmroute bench router: {error}", markup=False, soft_wrap=True)
        return 1
    console.print(_table(contestants))
    for line in _ratios(contestants[1:]):
        console.print(line, markup=False)
    if settings.out is not None:
        results = {c.name: {"failed": c.failed, **c.measured} for c in contestants}
        Path(settings.out).write_text(json.dumps(results, indent=1))
    return 1 if any(contestant.failed for contestant in contestants) else 0


def _start(settings: BenchRouterSettings, stack: ExitStack) -> list[_Contestant]:
    """Direct first, then our router, then the others."""
    redis = stack.enter_context(find_or_start(settings.redis))
    upstreams = stack.enter_context(_module("loadtest.bench_upstreams", redis.url, str(settings.replicas)))
    replicas = _ready_line(upstreams)
    contestants = [_Contestant("direct", replicas, None)]
    commands = [f"{sys.executable} -m warmroute router --port {{port}} --redis {redis.url} {settings.router_flags}"]
    for command in [*commands, *settings.peer_command]:
        url, pid = stack.enter_context(running_peer(command, replicas, subprocess.DEVNULL))
        name = program_name(command)
        taken = sum(name == contestant.name.split(" ")[0] for contestant in contestants)
        contestants.append(_Contestant(f"{name} {taken + 1}" if taken else name, [url], pid))
    contestants += [_Contestant(url, [url], None) for url in settings.peer]
    time.sleep(_SETTLE_SECONDS)
    for contestant in contestants:  # what is done once is not measured
        _play(contestant, Job(contestant.urls, None, settings.connections, 20 * settings.connections))
    return contestants


def _measure(contestant: _Contestant, settings: BenchRouterSettings, seed: int) -> None:
    memory = resident_bytes(contestant.pid) if contestant.pid else 0
    base = Job(contestant.urls, contestant.pid, settings.connections, settings.requests, seed=2 * seed)
    whole = _play(contestant, base)
    contestant.note("per_second", whole.requests / whole.seconds)
    timed = msgspec.structs.replace(
        base, requests=min(_OPEN_LOOP_REQUESTS, settings.requests), rate=settings.rate, seed=2 * seed + 1_000
    )
    figures = _play(contestant, timed)
    contestant.note("p50_ms", _share(figures, 0.5))
    contestant.note("p99_ms", _share(figures, 0.99))
    contestant.note("among_long_p99_ms", _share(_among_long_prompts(contestant, timed), 0.99))
    contestant.note("hold_ms", _hold(contestant, settings, 2 * seed + 2_000))
    streams = settings.requests // 8
    connections = min(_STREAM_CONNECTIONS, streams)
    job = msgspec.structs.replace(base, connections=connections, requests=streams, stream=True, seed=2 * seed + 1)
    streamed = _play(contestant, job)
    if contestant.pid:
        contestant.note("cpu_us", 1e6 * whole.cpu_seconds / whole.requests)
        contestant.note("stream_cpu_us", 1e6 * streamed.cpu_seconds / streamed.requests)
        contestant.note(
            "chunk_us", (contestant.measured["stream_cpu_us"][-1] - contestant.measured["cpu_us"][-1]) / CHUNKS
        )
        contestant.note("memory_mib", resident_bytes(contestant.pid) / _MIB)
        contestant.note("grown_mib", (resident_bytes(contestant.pid) - memory) / _MIB)


def _among_long_prompts(contestant: _Contestant, timed: Job) -> Figures:
    """The same again, other prompts, while very long ones arrive too."""
    assert timed.rate is not None
    number = max(1, int(_LONG_PROMPTS_PER_SECOND * timed.requests / timed.rate))
    long = msgspec.structs.replace(_long_prompts(contestant, number, timed.seed + 1_000), rate=_LONG_PROMPTS_PER_SECOND)
    with ThreadPoolExecutor(1) as executor:
        playing = executor.submit(_play, contestant, long)
        figures = _play(contestant, msgspec.structs.replace(timed, seed=timed.seed + 1_001))
        playing.result()
    return figures


def _long_prompts(contestant: _Contestant, number: int, seed: int) -> Job:
    return Job(contestant.urls, None, _LONG_CONNECTIONS, number, seed=seed, tail_words=_LONG_PROMPT_TOKENS)


def _share(figures: Figures, share: float) -> float:
    """The latency within which this share of requests was answered, in milliseconds."""
    return sorted(figures.latencies_ms)[int(share * len(figures.latencies_ms))]


def _hold(contestant: _Contestant, settings: BenchRouterSettings, seed: int) -> float:
    """How many milliseconds a small request waited at the longest while very long prompts went through."""
    job = _long_prompts(contestant, _LONG_PROMPTS, seed)
    with ThreadPoolExecutor(1) as executor:
        playing = executor.submit(_play, contestant, job)
        longest = longest_wait_seconds(contestant.urls[0], playing.done)
        playing.result()
    return 1e3 * longest


def _soak(contestant: _Contestant, settings: BenchRouterSettings) -> None:
    """By how much memory grows after the first requests, each with a prompt of its own."""
    if contestant.pid is None:
        return
    after_first = 0
    for number in range(max(2, settings.soak_requests // _SOAK_STEP)):
        _play(contestant, Job(contestant.urls, None, settings.connections, _SOAK_STEP, seed=_SOAK_SEED + number))
        after_first = after_first or resident_bytes(contestant.pid)
    contestant.note("soak_mib", (resident_bytes(contestant.pid) - after_first) / _MIB)


def _add_latencies(contestants: list[_Contestant]) -> None:
    direct = contestants[0].measured
    for contestant in contestants[1:]:
        for figure in ("p50_ms", "p99_ms"):
            contestant.note(f"added_{figure}", contestant.measured[figure][-1] - direct[figure][-1])


def _play(contestant: _Contestant, job: Job) -> Figures:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "loadtest.bench_load"],
            input=msgspec.json.encode(job),
            capture_output=True,
            timeout=_RUN_SECONDS,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {error.returncode}"]
        raise _BenchError(f"{contestant.name}: {reason[-1]}") from None
    except subprocess.TimeoutExpired:
        raise _BenchError(f"{contestant.name} did not answer all requests within {_RUN_SECONDS:g} s") from None
    figures = msgspec.json.decode(done.stdout, type=Figures)
    contestant.failed += figures.failed
    return figures


def _table(contestants: list[_Contestant]) -> Table:
    table = Table(title="Median of the rounds, lowest to highest in brackets")
    table.add_column("")
    for contestant in contestants:
        table.add_column(contestant.name, justify="right")
    for heading, row in _ROWS.items():
        table.add_row(heading, *(_cell(contestant.measured.get(row.figure), row.form) for contestant in contestants))
    table.add_row("failed", *(str(contestant.failed) for contestant in contestants))
    return table


def _cell(values: list[float] | None, form: str) -> str:
    if not values:
        return ""
    low, middle, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def _ratios(contestants: list[_Contestant]) -> Iterator[str]:
    """Ours over each other's, round by round."""
    ours, *others = contestants
    for other in others:
        for heading, figure in (("CPU per request", "cpu_us"), ("CPU per stream", "stream_cpu_us")):
            if figure in other.measured:
                pairs = [mine / its for mine, its in zip(ours.measured[figure], other.measured[figure], strict=True)]
                spread = f"{min(pairs):.2f} to {max(pairs):.2f}"
                yield f"{heading}, {ours.name} / {other.name}: {statistics.median(pairs):.2f} ({spread})"


@contextmanager
def _module(name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with started([sys.executable, "-m", name, *arguments], subprocess.PIPE, subprocess.DEVNULL) as process:
        yield process


def _ready_line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    there, _, _ = select.select([process.stdout], [], [], _READY_SECONDS)
    word, *urls = (process.stdout.readline().split() if there else []) or [""]
    if word != "ready":
        raise _BenchError("the bench's replicas do not start")
    return urls
