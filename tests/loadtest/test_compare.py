"""`warmroute compare` as a user runs it, on a real cluster of simulated engines."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from rich.console import Console
from rich.progress import Progress

from loadtest.cluster import Cluster
from loadtest.compare import _Comparison, _Stage
from shared.settings import CompareSettings
from tests.helpers import wait_until
from tests.loadtest.test_results import record, run

SMALL = ["--engine", "sim", "--replicas", "4", "--rate", "6", "--requests", "60", "--repeats", "1", "--blocks", "120"]
SMALL += ["--opening-words", "100", "--open-sessions", "6", "--turns", "5", "--max-tokens", "8"]
SMALL += ["--token-budget", "32", "--log-level", "error"]
# A prompt takes tenths of a second, so that neither the generator's lag nor a busy machine matters beside it.
SMALL += ["--replica-flags", "--sim-per-token-seconds 2e-3"]
PEER = f"turns={sys.executable} {Path(__file__).with_name('peer_router.py')} {{port}} {{replicas}}"


def compare(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "warmroute", "compare", "--out", str(out), *SMALL, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    out = tmp_path_factory.mktemp("compare")
    return compare(out, "--peers", PEER, "--simulate"), out


@pytest.fixture(scope="module")
def results(finished: tuple[subprocess.CompletedProcess[str], Path]) -> dict[str, Any]:
    done, out = finished
    assert (out / "results.json").exists(), done.stderr
    loaded: dict[str, Any] = json.loads((out / "results.json").read_text())
    return loaded


def test_every_request_is_answered_and_every_prompt_is_explained(results: dict[str, Any]) -> None:
    assert list(results["policies"]) == ["cache-aware", "round-robin", "turns"]
    for policy in results["policies"].values():
        assert (policy["requests"], policy["failed"]) == (60, 0)
        assert [run["unexplained_prompts"] for run in policy["repeats"]] == [0]
        assert sum(share["requests"] for share in policy["replicas"].values()) == 60
        assert list(policy["replicas"]) == [f"replica-{n + 1}" for n in range(4)]


@pytest.mark.parametrize("other", ["round-robin", "turns"])
def test_cache_aware_keeps_its_advantage_over_our_own_round_robin_and_over_a_peers(
    results: dict[str, Any], other: str
) -> None:
    ours, theirs = results["policies"]["cache-aware"], results["policies"][other]
    assert theirs["hit_rate"] <= theirs["ideal_hit_rate"]
    assert 0.8 * ours["ideal_hit_rate"] < ours["hit_rate"] <= ours["ideal_hit_rate"]
    assert ours["hit_rate"] > 1.5 * theirs["hit_rate"]
    assert ours["ttft_ms"]["mean"] < 0.75 * theirs["ttft_ms"]["mean"]


def test_the_simulator_comes_to_the_same_figures_as_the_fleet(results: dict[str, Any]) -> None:
    assert results["simulated"].keys() == {"cache-aware", "round-robin"}, "a peer's router is not ours to simulate"
    for policy, simulated in results["simulated"].items():
        live = results["policies"][policy]
        assert simulated["hit_rate"] == pytest.approx(live["hit_rate"], abs=0.1)
        assert simulated["ttft_ms_mean"] < 1.2 * live["ttft_ms"]["mean"], "a live fleet may be slowed by its machine"
        assert simulated["ttft_ms_mean"] > 0.5 * live["ttft_ms"]["mean"]


def test_the_router_knew_what_its_choice_had_cached(results: dict[str, Any]) -> None:
    assert results["policies"]["cache-aware"]["misprediction"] < 0.1


def test_both_policies_met_the_same_ideal_because_they_met_the_same_prompts(results: dict[str, Any]) -> None:
    ideals = [policy["ideal_hit_rate"] for policy in results["policies"].values()]
    assert ideals[0] == pytest.approx(ideals[1], abs=0.02)  # only the order in which prompts were sent may differ


def test_the_table_the_report_and_the_exit_code_say_so(
    finished: tuple[subprocess.CompletedProcess[str], Path], results: dict[str, Any]
) -> None:
    done, out = finished
    assert done.returncode == (0 if all(p["valid_repeats"] for p in results["policies"].values()) else 1)
    assert "round-robin" in done.stdout
    assert f"report: {out / 'report.html'}" in done.stdout
    assert "<svg" in (out / "report.html").read_text()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--peers", "no command"], "--peers: 'no command' is not like NAME=COMMAND"),
        (["--peers", "cache-aware=run {port} {replicas}"], "--peers: cache-aware is taken"),
        (["--rate", "none", "--rates", "fast"], "--rates: 'fast' is neither like 2.5"),
        (["--rates", "2,4"], "--rate and --rates exclude each other"),
        (["--engine", "torch", "--simulate"], "--simulate and rates in % need --engine sim"),
        (["--objective", "soon"], "--objective: 'soon' is not like ttft=1,tpot=0.1"),
        (["--scale", "2"], "--scale and --shrink belong to a --trace"),
        (["--replica-flags", "--sim-speed 3"], "unknown flag --sim-speed"),
    ],
)
def test_flags_that_make_no_sense_end_it_with_one_clear_line(tmp_path: Path, flags: list[str], complaint: str) -> None:
    done = compare(tmp_path, *flags)
    assert done.returncode == 2
    assert done.stderr.startswith(f"warmroute compare: {complaint}")
    assert len(done.stderr.splitlines()) == 1


def test_a_peer_that_does_not_start_ends_it_by_name(tmp_path: Path) -> None:
    done = compare(tmp_path, "--policies", "", "--peers", "broken=false {port} {replicas}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("warmroute compare: false does not answer on its port")


def test_a_trace_is_played_at_several_rates_and_the_report_has_its_curves(tmp_path: Path) -> None:
    """Three first blocks in turn, and a second block that nobody shares."""
    asked = [{"timestamp": 900 * n, "input_length": 900, "output_length": 40} for n in range(16)]
    lines = [{**line, "hash_ids": [n % 3, 10 + n]} for n, line in enumerate(asked)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--rate", "none", "--trace", str(trace), "--shrink", "4", "--rates", "4,50%", "--policies", "cache-aware"]
    done = compare(tmp_path, *flags, "--requests", "16", "--replicas", "2")
    assert (tmp_path / "results.json").exists(), done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    half, four = results["rates"]
    assert four["rate"] == pytest.approx(4)
    alone = 225 * 2e-3 + 8 * 0.008  # a prompt of 225 words by the cost model; its template adds a few tokens
    assert half["rate"] == pytest.approx(0.5 * 2 / alone, rel=0.1)
    assert results["policies"] == four["policies"], "the highest rate's"
    for rate in results["rates"]:
        (policy,) = rate["policies"].values()
        assert (policy["requests"], policy["failed"]) == (16, 0)
        assert policy["ideal_hit_rate"] == pytest.approx(13 * 128 / (16 * 225), rel=0.1)
    assert (tmp_path / "report.html").read_text().count("<svg") == 5
    assert "4 requests per second" in done.stdout


def test_a_trace_that_is_none_ends_it_before_anything_is_started(tmp_path: Path) -> None:
    done = compare(tmp_path, "--trace", str(tmp_path / "missing.jsonl"))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "missing.jsonl cannot be read" in done.stderr


def test_an_unusable_model_ends_it_with_one_clear_line(tmp_path: Path) -> None:
    done = compare(tmp_path, "--model", "no-such-model")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "warmroute compare: --engine sim plays the model tiny only, not 'no-such-model': leave --model out"
    ]
    assert not (tmp_path / "results.json").exists()


def test_a_replica_that_does_not_start_is_told_in_one_clean_line(tmp_path: Path) -> None:
    done = compare(tmp_path, "--engine", "torch", "--model", "/no/such/folder")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("warmroute compare: replica-")
    assert "did not start: model /no/such/folder: no such directory" in done.stderr
    assert done.stderr.count("/no/such/folder") == 1


def test_a_void_run_is_shown_as_tried_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    settings = CompareSettings(policies=("round-robin",), engine="sim")
    comparison = _Comparison(settings, tmp_path, Console(file=shown))
    tries = [run(record(1.0, lag_ms=1e4)), run(record(1.0))]
    monkeypatch.setattr(comparison, "_run_once", lambda *_: tries.pop(0))
    with Progress(console=Console(file=shown)) as progress:
        stage, task = _Stage(comparison._plan, tmp_path, {}), progress.add_task("a", total=1)
        comparison._run_soundly(cast("Cluster", None), stage, "round-robin", 0, progress, task)
    first, second = [line for line in shown.getvalue().splitlines() if line.startswith("round-robin")]
    assert first.startswith("round-robin, repeat 1: ")
    assert "; void: " in first
    assert second.startswith("round-robin, repeat 1, tried once more: ")


def test_a_stop_in_the_middle_leaves_nothing_running(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "warmroute", "compare", "--out", str(tmp_path), *SMALL, "--requests", "5000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        records = tmp_path / "runs" / "cache-aware-1" / "records.jsonl"
        wait_until(lambda: records.exists() and records.stat().st_size > 0, 60, "the first answer")
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 4, "two replicas, a router, a load generator"
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    wait_until(lambda: not any(program.is_running() for program in started), 10, "the end of every program")
