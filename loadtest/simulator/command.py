"""`warmroute simulate`: the same arrivals against each policy in virtual time, repeated by seed, and reported."""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from loadtest.results import Results, Run, measure_run, ratios, summarize_policy
from loadtest.simulator import decisions_report
from loadtest.simulator.baselines import SIMULATED_POLICIES
from loadtest.simulator.bound import bound_ttft_ms
from loadtest.simulator.fleet import FleetChange, FleetSetup, Simulation
from loadtest.simulator.generators import WORKLOADS, generate
from loadtest.simulator.profiles import PROFILES
from loadtest.simulator.traces import Conversation, TraceError, offered_load, read_trace, stretched
from loadtest.summary import COLUMNS, cells, ratio_line
from shared.settings import SettingsError, SimulateSettings

__all__ = ["run"]

_BASELINE = "round-robin"
_REFUSED_AFTER_SECONDS = 60.0
_DRAWN_REQUESTS = 1000
"""Of a run, in the report's figures: all of them would make it many megabytes."""


def run(settings: SimulateSettings) -> int:
    """The exit code: 0 if every request was answered, else 1."""
    if settings.decisions is not None:
        return decisions_report.run(settings, Path(settings.decisions))
    stderr = Console(stderr=True)
    setup, policies = _fleet(settings), _policies(settings)
    runs: dict[str, list[Run]] = {policy: [] for policy in policies}
    bounds: list[float] = []
    decisions, began = 0, time.perf_counter()
    try:
        for repeat in range(settings.repeats):
            seed = settings.seed + repeat
            conversations = _conversations(settings, setup, seed)
            for policy in policies:
                simulation = Simulation(setup, SIMULATED_POLICIES[policy], conversations, seed=seed).run()
                decisions += simulation.decisions
                done = _measured(simulation, policy, repeat, seed)
                runs[policy].append(done)
                bounds.append(bound_ttft_ms(simulation.records, simulation.ideals, setup.profile, settings.replicas))
                result = done.result
                stderr.print(
                    f"{policy}, repeat {repeat + 1}: mean TTFT {result.ttft_ms.mean:,.0f} ms, "
                    f"hit rate {result.hit_rate:.1%} of {result.ideal_hit_rate:.1%}, {result.failed} failed",
                    highlight=False,
                    markup=False,
                )
    except TraceError as error:
        stderr.print(f"simulate: {error}", markup=False, soft_wrap=True)
        return 1
    seconds = time.perf_counter() - began
    results = {policy: summarize_policy(each, _REFUSED_AFTER_SECONDS) for policy, each in runs.items()}
    described = _described(settings, setup) | {
        "bound_ttft_ms_mean": round(fmean(bounds), 1),
        "decisions": decisions,
        "real_seconds": round(seconds, 1),
    }
    baseline = _BASELINE if _BASELINE in policies else policies[-1]
    _write(Path(settings.out), Results(results, ratios(results, baseline), described), runs)
    _show(Results(results, ratios(results, baseline), described), Path(settings.out))
    return 0 if all(result.failed == 0 for result in results.values()) else 1


def _policies(settings: SimulateSettings) -> list[str]:
    names = list(SIMULATED_POLICIES) if settings.policies == ("all",) else list(dict.fromkeys(settings.policies))
    for name in names:
        if name not in SIMULATED_POLICIES:
            raise SettingsError(f"--policies: {name!r} is not one of all, {', '.join(SIMULATED_POLICIES)}")
    return names


def _fleet(settings: SimulateSettings) -> FleetSetup:
    if settings.profile not in PROFILES:
        raise SettingsError(f"--profile: {settings.profile!r} is not one of {', '.join(PROFILES)}")
    profile = PROFILES[settings.profile]
    return FleetSetup(
        replicas=settings.replicas,
        profile=profile,
        blocks=settings.blocks or max(1, profile.kv_tokens // settings.block_size),
        block_size=settings.block_size,
        host_blocks=settings.host_blocks,
        routers=settings.routers,
        share_seconds=settings.share_seconds if settings.share_seconds and settings.routers > 1 else None,
        publish_seconds=settings.publish_seconds,
        publishes=not settings.silent,
        changes=tuple(map(_change, settings.change)),
    )


def _change(told: str) -> FleetChange:
    action, _, rest = told.partition(":")
    replica_id, _, seconds = rest.partition("@")
    try:
        if action in ("join", "leave", "drain") and replica_id:
            return FleetChange(float(seconds), action, replica_id)
    except ValueError:
        pass
    raise SettingsError(f"--change: {told!r} is not like drain:r001@60, leave:r001@60 or join:r001@90")


def _conversations(settings: SimulateSettings, setup: FleetSetup, seed: int) -> list[Conversation]:
    if settings.trace is None:
        if settings.workload not in WORKLOADS:
            raise SettingsError(f"--workload: {settings.workload!r} is not one of {', '.join(WORKLOADS)}")
        found = generate(settings.workload, settings.requests or 3000, settings.rate, seed)
    else:
        most = min(settings.most_prompt_tokens, setup.blocks * setup.block_size * 3 // 4)
        found = read_trace(Path(settings.trace), seed, most, settings.most_think_seconds)
    scale = settings.scale
    if settings.load is not None:
        scale *= offered_load(found, setup.profile, setup.replicas) / settings.load
    return stretched(sorted(found, key=lambda each: each.start_seconds)[: settings.requests], scale)


def _measured(simulation: Simulation, policy: str, repeat: int, seed: int) -> Run:
    return measure_run(
        simulation.records,
        simulation.ideals,
        policy=policy,
        repeat=repeat,
        seed=seed,
        replica_ids=list(simulation.replicas),
        timeout_seconds=_REFUSED_AFTER_SECONDS,
    )


def _described(settings: SimulateSettings, setup: FleetSetup) -> dict[str, Any]:
    return {
        "what": "a simulation in virtual time, with the router's placement and the replicas' scheduler and cache",
        "asked": (settings.trace and Path(settings.trace).name) or f"{settings.workload} at {settings.rate:g}/s",
        "load": f"{settings.load:.0%} of capacity without a cache" if settings.load else f"scale {settings.scale:g}",
        "replicas": settings.replicas,
        "routers": settings.routers,
        "work_known_to_others_after_seconds": setup.share_seconds if setup.share_seconds is not None else "never",
        "profile": settings.profile,
        "blocks_per_replica": f"{setup.blocks} of {setup.block_size} tokens",
        "host_blocks_per_replica": settings.host_blocks,
        "caches_seen_after_seconds": setup.publish_seconds if setup.publishes else "never",
        "changes": list(settings.change),
        "repeats": settings.repeats,
        "seeds": [settings.seed + repeat for repeat in range(settings.repeats)],
    }


def _write(out: Path, results: Results, runs: dict[str, list[Run]]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2))
    if importlib.util.find_spec("matplotlib") is None:
        return
    from loadtest.report import write_report

    write_report(
        out / "report.html",
        results,
        {policy: [replace(run, records=_thinned(run.records)) for run in each] for policy, each in runs.items()},
        method=_METHOD,
    )


def _thinned(records: Any) -> Any:
    return records[:: max(1, len(records) // _DRAWN_REQUESTS)]


def _show(results: Results, out: Path) -> None:
    stdout = Console(width=None if sys.stdout.isatty() else 200)
    table = Table("policy", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for policy, result in results.policies.items():
        table.add_row(policy, *(_cell(*cell) for cell in cells(result)))
    stdout.print(table)
    for ratio in results.ratios:
        if ratio.measure == "ttft_ms_mean":
            stdout.print(ratio_line(ratio), highlight=False, markup=False, soft_wrap=True)
    setup = results.setup
    stdout.print(
        f"\none queue and one endless cache for all: mean TTFT {setup['bound_ttft_ms_mean']:,.0f} ms\n"
        f"{setup['decisions']:,} decisions in {setup['real_seconds']:,.0f} s\n"
        f"report: {(out / 'report.html').resolve()}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _cell(value: str, spread: str) -> str:
    return f"{value} [dim]({spread})[/dim]" if spread else value


_METHOD = (
    "Discrete events in virtual time: routers decide with the product's own placement, ledger and index, replicas run "
    "its own scheduler and prefix cache; seconds come from a cost model. Latency counts from the arrival.",
    "Arrivals come from a trace or a generator and a seed, the same for every policy; within a conversation a turn "
    "waits for the answer before it. Every run begins with cold replicas. Ratios are paired by repeat.",
    "Peers' policies are written from their published descriptions, with their documented defaults, and see exact "
    "caches and current loads, which is more than some of them have.",
    "Figures are drawn from every n-th request; tables count all.",
)
