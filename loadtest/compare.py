"""`warmroute compare`: the same arrivals against each policy, each time on cold replicas, repeated and reported.

Repeat r has its own seed and begins with another policy, so that neither luck nor a machine that grows warm or tired
favours one. A run whose load generator lagged is void and tried once more.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from loadtest.cluster import Cluster, ClusterError, running_cluster
from loadtest.load_generator import LoadGeneratorError, play
from loadtest.oracle import ideal_hits
from loadtest.results import Results, Run, measure_run, ratios, summarize_policy
from loadtest.summary import COLUMNS, cells, headline, notes, ratio_line
from loadtest.workloads import SHAPES, Plan, Shape
from shared.embedded_redis import EmbeddedRedisError
from shared.prompts import ChatPrompt, PromptError
from shared.settings import CompareSettings
from shared.supervisor import ChildFailedError

__all__ = ["run"]

_DEFAULT_RATES = {"torch": 2.0, "sim": 20.0}
_PREFERRED_BASELINE = "round-robin"
_ATTEMPTS = 2
_NAME_WIDTH, _POLICY_WIDTH = 16, 32
_INTERRUPTED = 130


def run(settings: CompareSettings) -> int:
    """The exit code: 0 if every request was answered and every policy has a run that is not void, else 1."""
    stderr = Console(stderr=True)
    if missing := [name for name in ("locust", "matplotlib") if importlib.util.find_spec(name) is None]:
        stderr.print(
            f"warmroute compare: it needs {' and '.join(missing)}: pip install 'warmroute\\[loadtest]'", soft_wrap=True
        )
        return 1
    out = Path(settings.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _termination_as_interrupt():
            results, runs = _Comparison(settings, out, stderr).run()
    except KeyboardInterrupt:
        stderr.print("warmroute compare: stopped, no report was written")
        return _INTERRUPTED
    except (ChildFailedError, ClusterError, EmbeddedRedisError, LoadGeneratorError, OSError, PromptError) as error:
        stderr.print(f"warmroute compare: {error}", markup=False, soft_wrap=True)
        return 1
    _write(out, results, runs)
    _show(results, out)
    sound = all(result.failed == 0 and result.valid_repeats > 0 for result in results.policies.values())
    return 0 if sound else 1


class _Comparison:
    def __init__(self, settings: CompareSettings, out: Path, stderr: Console) -> None:
        self._settings = settings
        self._out = out
        self._stderr = stderr
        rate = settings.rate or _DEFAULT_RATES[settings.engine]
        self._plan = Plan(settings.workload, _shape(settings), settings.seed, rate, settings.requests)
        self._busy_shares: dict[str, list[float]] = {policy: [] for policy in settings.policies}
        self._reruns = 0

    def run(self) -> tuple[Results, dict[str, list[Run]]]:
        settings = self._settings
        policies = list(dict.fromkeys(settings.policies))
        runs: dict[str, list[Run]] = {policy: [] for policy in policies}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with (self._out / "cluster.log").open("w") as log, Progress(*columns, console=self._stderr) as progress:
            task = progress.add_task("starting the cluster", total=len(policies) * settings.repeats * settings.requests)
            with running_cluster(settings, log) as cluster:
                for repeat in range(settings.repeats):
                    turn = repeat % len(policies)
                    for policy in policies[turn:] + policies[:turn]:
                        runs[policy].append(self._run_soundly(cluster, policy, repeat, progress, task))
                setup = self._setup(cluster)
        results = {policy: summarize_policy(each, settings.request_timeout_seconds) for policy, each in runs.items()}
        baseline = _PREFERRED_BASELINE if _PREFERRED_BASELINE in policies else policies[-1]
        return Results(results, ratios(results, baseline), setup), runs

    def _run_soundly(self, cluster: Cluster, policy: str, repeat: int, progress: Progress, task: TaskID) -> Run:
        """The run, or the last attempt at it if all were void."""
        done = progress.tasks[task].completed
        for attempt in range(_ATTEMPTS):
            self._reruns += attempt > 0
            again = ", tried once more" if attempt else ""
            progress.update(task, description=f"repeat {repeat + 1} of {self._settings.repeats}: {policy}")
            tried = self._run_once(cluster, policy, repeat, lambda n: progress.update(task, completed=done + n))
            result = tried.result
            progress.console.print(
                f"{policy}, repeat {repeat + 1}{again}: mean TTFT {result.ttft_ms.mean:,.0f} ms, hit rate "
                f"{result.hit_rate:.1%} of {result.ideal_hit_rate:.1%}, {result.failed} failed"
                + (f"; void: {result.void}" if result.void else ""),
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
            if result.void is None:
                break
        return tried

    def _run_once(self, cluster: Cluster, policy: str, repeat: int, on_progress: Callable[[int], None]) -> Run:
        plan = self._plan.with_seed(self._settings.seed + repeat)
        timeout_seconds = self._settings.request_timeout_seconds
        with cluster.router(policy) as url:
            busy, began = cluster.busy_seconds(), time.monotonic()
            records = play(
                plan,
                host=url,
                model=cluster.model,
                folder=self._out / "runs" / f"{policy}-{repeat + 1}",
                timeout_seconds=timeout_seconds,
                on_progress=on_progress,
            )
            wall = time.monotonic() - began
            self._busy_shares[policy] += [
                (after - busy[name]) / wall for name, after in cluster.busy_seconds().items() if name in busy
            ]
        encoder = cluster.encoder
        ideals = ideal_hits(
            plan.schedule(),
            records,
            lambda messages: encoder.encode(ChatPrompt(messages)).token_ids,
            lambda text: encoder.tokenizer.encode(text, add_special_tokens=False).ids,
        )
        return measure_run(
            records,
            ideals,
            policy=policy,
            repeat=repeat,
            seed=plan.seed,
            replica_ids=list(cluster.replicas),
            timeout_seconds=timeout_seconds,
        )

    def _setup(self, cluster: Cluster) -> dict[str, Any]:
        settings, plan = self._settings, self._plan
        return {
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {_processor()}",
            "python": platform.python_version(),
            "model": cluster.model,
            "engine": settings.engine,
            "replicas": settings.replicas,
            "blocks_per_replica": f"{cluster.capacity_blocks} of {cluster.block_size} tokens",
            "workload": plan.workload,
            "shape": asdict(plan.shape),
            "rate": f"{plan.rate:g} requests/s, Poisson arrivals",
            "requests_per_run": plan.requests,
            "repeats": settings.repeats,
            "seeds": [plan.seed + repeat for repeat in range(settings.repeats)],
            "request_timeout_seconds": settings.request_timeout_seconds,
            "replica_processor_use": {
                policy: f"{_mean(shares):.0%}" for policy, shares in self._busy_shares.items() if shares
            },
            "void_runs_tried_again": self._reruns,
        }


def _shape(settings: CompareSettings) -> Shape:
    """The workload's usual one, with what the settings say instead."""
    usual = SHAPES[settings.workload]
    given = {name: value for name in asdict(usual) if (value := getattr(settings, name)) is not None}
    return replace(usual, **given)


def _write(out: Path, results: Results, runs: dict[str, list[Run]]) -> None:
    # Only here: the report draws with matplotlib, which takes its time to load.
    from loadtest.report import write_report

    encoded = msgspec.json.format(msgspec.json.encode(results), indent=2)
    (out / "results.json").write_bytes(encoded)
    believed = {policy: [run for run in each if run.result.void is None] or each for policy, each in runs.items()}
    write_report(out / "report.html", results, believed)


def _show(results: Results, out: Path) -> None:
    policies = results.policies
    stdout = Console(width=None if sys.stdout.isatty() else _NAME_WIDTH + _POLICY_WIDTH * len(policies))
    table = Table("", box=box.SIMPLE_HEAD, pad_edge=False)
    for policy in policies:
        table.add_column(policy, justify="right")
    for name, *row in zip(COLUMNS, *map(cells, policies.values()), strict=True):
        table.add_row(name, *(f"{value} [dim]({spread})[/dim]" if spread else value for value, spread in row))
    stdout.print(table)
    for line in [*map(ratio_line, results.ratios), "", headline(results), *notes(results)]:
        stdout.print(line, highlight=False, markup=False, soft_wrap=True)
    stdout.print(f"\nreport: {(out / 'report.html').resolve()}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM stops everything in order, as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
