"""`warmroute compare`: the same arrivals against each policy, each time on cold replicas, repeated and reported.

Repeat r has its own seed and begins with another policy, so that neither luck nor a machine that grows warm or tired
favours one. A run whose load generator lagged is void and tried once more.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from loadtest.cluster import Cluster, ClusterError, running_cluster
from loadtest.load_generator import LoadGeneratorError, play
from loadtest.objective import Objective
from loadtest.oracle import ideal_hits
from loadtest.peers import Peer, PeerError, parse_peer
from loadtest.plans import AnyPlan, plan_of, plans_at_rates
from loadtest.results import RateResults, Results, Run, measure_run, ratios, summarize_policy
from loadtest.simulator.live_check import simulated_errors
from loadtest.simulator.traces import TraceError
from loadtest.terminal import show
from loadtest.trace_plan import TracePlan
from shared.embedded_redis import EmbeddedRedisError
from shared.prompts import PromptError
from shared.settings import CompareSettings, SettingsError
from shared.supervisor import ChildFailedError

__all__ = ["run"]

_PREFERRED_BASELINE = "round-robin"
_ATTEMPTS = 2
_INTERRUPTED = 130
_TOLD = (ChildFailedError, ClusterError, EmbeddedRedisError, LoadGeneratorError, PeerError, PromptError, TraceError)


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
    except (*_TOLD, OSError) as error:
        stderr.print(f"warmroute compare: {error}", markup=False, soft_wrap=True)
        return 1
    _write(out, results, runs)
    show(results, out)
    return 0 if results.sound else 1


def _write(out: Path, results: Results, runs: dict[str, list[Run]]) -> None:
    # Only here: the report draws with matplotlib, which takes its time to load.
    from loadtest.report import write_report

    encoded = msgspec.json.format(msgspec.json.encode(results), indent=2)
    (out / "results.json").write_bytes(encoded)
    believed = {name: [run for run in each if run.result.void is None] or each for name, each in runs.items()}
    write_report(out / "report.html", results, believed)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One rate: its plan, and the runs so far by contestant."""

    plan: AnyPlan
    folder: Path
    runs: dict[str, list[Run]]


class _Comparison:
    def __init__(self, settings: CompareSettings, out: Path, stderr: Console) -> None:
        """Raises SettingsError and TraceError."""
        self._settings = settings
        self._out = out
        self._stderr = stderr
        self._objective = Objective.parse(settings.objective)
        self._plan = plan_of(settings)
        self._contestants = _contestants(settings)
        self._busy_shares: dict[str, list[float]] = {name: [] for name in self._contestants}
        self._reruns = 0

    def run(self) -> tuple[Results, dict[str, list[Run]]]:
        """The results, and the runs of the highest rate."""
        settings, names = self._settings, list(self._contestants)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with (self._out / "cluster.log").open("w") as log, Progress(*columns, console=self._stderr) as progress:
            task = progress.add_task("starting the cluster", total=None)
            with running_cluster(settings, log) as cluster:
                stages = self._stages(cluster)
                requests = sum(_requests(stage.plan) for stage in stages)
                progress.update(task, total=len(names) * settings.repeats * requests)
                for repeat in range(settings.repeats):
                    turn = repeat % len(names)
                    for stage, name in product(stages, names[turn:] + names[:turn]):
                        stage.runs[name].append(self._run_soundly(cluster, stage, name, repeat, progress, task))
                setup = self._setup(cluster, [stage.plan.rate for stage in stages])
                rates = [self._summarized(stage, cluster) for stage in stages]
        return Results.of(rates, setup), stages[-1].runs

    def _stages(self, cluster: Cluster) -> list[_Stage]:
        plan = self._plan
        if isinstance(plan, TracePlan):
            plan = plan.fitting(min(cluster.context_tokens, cluster.capacity_blocks * cluster.block_size))
        plans = plans_at_rates(plan, self._settings, cluster.encode_prompt)
        folder, several = self._out / "runs", len(plans) > 1
        return [
            _Stage(each, folder / f"{each.rate:.3g}" if several else folder, {name: [] for name in self._contestants})
            for each in plans
        ]

    def _summarized(self, stage: _Stage, cluster: Cluster) -> RateResults:
        settings = self._settings
        policies = {
            name: summarize_policy(runs, settings.request_timeout_seconds, self._objective)
            for name, runs in stage.runs.items()
        }
        baseline = _PREFERRED_BASELINE if _PREFERRED_BASELINE in policies else list(policies)[-1]
        simulated = simulated_errors(stage.plan, stage.runs, cluster, settings) if settings.simulate else {}
        found = ratios(policies, baseline)
        for name, peer in self._contestants.items():
            if peer is not None and name != baseline:
                found += ratios(policies, name, of=settings.policies[:1])
        return RateResults(stage.plan.rate, policies, found, simulated)

    def _run_soundly(
        self, cluster: Cluster, stage: _Stage, name: str, repeat: int, progress: Progress, task: TaskID
    ) -> Run:
        """The run, or the last attempt at it if all were void."""
        done = progress.tasks[task].completed
        for attempt in range(_ATTEMPTS):
            self._reruns += attempt > 0
            again = ", tried once more" if attempt else ""
            pace = f" at {stage.plan.rate:.3g}/s" if self._settings.rates else ""
            progress.update(task, description=f"repeat {repeat + 1} of {self._settings.repeats}{pace}: {name}")
            tried = self._run_once(cluster, stage, name, repeat, lambda n: progress.update(task, completed=done + n))
            result = tried.result
            progress.console.print(
                f"{name}{pace}, repeat {repeat + 1}{again}: mean TTFT {result.ttft_ms.mean:,.0f} ms, hit rate "
                f"{result.hit_rate:.1%} of {result.ideal_hit_rate:.1%}, {result.failed} failed"
                + (f"; void: {result.void}" if result.void else ""),
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
            if result.void is None:
                break
        return tried

    def _run_once(
        self, cluster: Cluster, stage: _Stage, name: str, repeat: int, on_progress: Callable[[int], None]
    ) -> Run:
        plan = stage.plan.with_seed(self._settings.seed + repeat)
        timeout_seconds = self._settings.request_timeout_seconds
        peer = self._contestants[name]
        with cluster.router(name) if peer is None else cluster.peer(peer) as url:
            busy, began = cluster.busy_seconds(), time.monotonic()
            records = play(
                plan,
                host=url,
                model=cluster.model,
                folder=stage.folder / f"{name}-{repeat + 1}",
                timeout_seconds=timeout_seconds,
                on_progress=on_progress,
            )
            wall = time.monotonic() - began
            self._busy_shares[name] += [
                (after - busy[replica]) / wall for replica, after in cluster.busy_seconds().items() if replica in busy
            ]
        return measure_run(
            records,
            ideal_hits(plan.schedule(), records, cluster.encode_prompt, cluster.encode_answer),
            policy=name,
            repeat=repeat,
            seed=plan.seed,
            replica_ids=list(cluster.replicas),
            timeout_seconds=timeout_seconds,
            objective=self._objective,
        )

    def _setup(self, cluster: Cluster, rates: Sequence[float]) -> dict[str, Any]:
        settings, plan = self._settings, self._plan
        return {
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {_processor()}",
            "python": platform.python_version(),
            "model": cluster.model,
            "engine": settings.engine,
            "replicas": settings.replicas,
            "replica_flags": settings.replica_flags,
            "blocks_per_replica": f"{cluster.capacity_blocks} of {cluster.block_size} tokens",
            "peers": {name: peer.command for name, peer in self._contestants.items() if peer is not None},
            **_asked(plan),
            "rates": ", ".join(f"{rate:.3g} requests/s" for rate in rates),
            **({"rates_as_told": settings.rates} if settings.rates else {}),
            "objective": str(self._objective),
            "requests_per_run": settings.requests,
            "repeats": settings.repeats,
            "seeds": [plan.seed + repeat for repeat in range(settings.repeats)],
            "request_timeout_seconds": settings.request_timeout_seconds,
            "replica_processor_use": {
                name: f"{_mean(shares):.0%}" for name, shares in self._busy_shares.items() if shares
            },
            "void_runs_tried_again": self._reruns,
        }


def _contestants(settings: CompareSettings) -> dict[str, Peer | None]:
    """By name, ours first; a policy of ours is no peer."""
    found: dict[str, Peer | None] = dict.fromkeys(settings.policies)
    for told in settings.peers:
        try:
            peer = parse_peer(told)
        except ValueError as error:
            raise SettingsError(f"--peers: {error}") from None
        if peer.name in found:
            raise SettingsError(f"--peers: {peer.name} is taken; give every router a name of its own")
        found[peer.name] = peer
    return found


def _requests(plan: AnyPlan) -> int:
    return sum(len(session.turns) for session in plan.schedule())


def _asked(plan: AnyPlan) -> dict[str, Any]:
    if isinstance(plan, TracePlan):
        return {"trace": plan.workload, "told_times_shorter": plan.shrink}
    return {"workload": plan.workload, "shape": asdict(plan.shape), "arrivals": plan.arrivals}


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
