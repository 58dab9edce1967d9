"""Decisions asked again: the same policy chooses the same, others by their own rules, and bad files are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.simulator.command import run
from loadtest.simulator.decisions import AS_LOGGED, DecisionLogEmptyError, read_decisions, replay
from loadtest.simulator.decisions_report import calibrated
from loadtest.simulator.fleet import FleetSetup, Simulation
from loadtest.simulator.generators import generate
from router.decision_log import DecisionLog, older
from router.placement import Attempt, Decision
from router.policies import POLICIES
from router.policies.base import Candidate, Request
from shared.blocks import PublishedKey
from shared.settings import SettingsError, SimulateSettings


def simulated(path: Path, policy: str, requests: int = 150) -> None:
    """A fleet's decisions, logged as a router would."""
    log = DecisionLog(path, 1 << 30)

    def on_decision(request: Request, attempt: Attempt) -> None:
        log.decided("", 1, request, attempt.decision, 0.0)

    setup = FleetSetup(replicas=4, blocks=150, block_size=128)
    Simulation(setup, POLICIES[policy], generate("chat", requests, 10.0, seed=1), on_decision=on_decision).run()
    log.close()


def logged(path: Path, *costs: tuple[float, ...], chosen: int = 0, view: str = "exact", seconds: float = 0.3) -> Path:
    """A decision for each tuple of the candidates' costs, answered after `seconds`."""
    log = DecisionLog(path, 1 << 30)
    for number, each in enumerate(costs):
        candidates = [
            Candidate(f"r{place}", 0, 0, 0, 1.0, 0.1, 0.05, 0.0, cost, 9 - place) for place, cost in enumerate(each)
        ]
        decision = Decision("round-robin", view, "turn", candidates[chosen], candidates, 40)
        request = Request(40, [PublishedKey(number)], 16)
        log.decided(f"id-{number}", 1, request, decision, 1.0).first_token(1.0 + seconds, 16)
    log.close()
    return path


def asked(path: Path, out: Path, **changes: Any) -> SimulateSettings:
    return SimulateSettings(**{"decisions": str(path), "out": str(out), **changes})


@pytest.mark.parametrize("policy", POLICIES)
def test_the_policy_that_decided_decides_the_same_again(policy: str, tmp_path: Path) -> None:
    simulated(tmp_path / "log", policy)
    told = read_decisions(tmp_path / "log")
    assert len(told.decisions) == 150
    assert replay(policy, told.decisions).agreed == 150
    assert replay(policy, told.decisions).regrets == replay(AS_LOGGED, told.decisions).regrets


def test_regret_is_what_a_choice_costs_above_the_best(tmp_path: Path) -> None:
    told = read_decisions(logged(tmp_path / "log", (1.0, 0.25), (0.5, 2.0), chosen=0))
    assert replay(AS_LOGGED, told.decisions).regrets == [0.75, 0.0]
    assert replay("cache-aware", told.decisions) == ([0.0, 0.0], 1)
    assert replay("least-loaded", told.decisions) == ([0.0, 1.5], 0), "the second has fewer active"


def test_a_policy_that_reads_the_view_is_not_asked_where_the_router_had_none(tmp_path: Path) -> None:
    costs = [(float(number % 3), float(number % 2), 0.5) for number in range(30)]
    told = read_decisions(logged(tmp_path / "log", *costs, view="hash"))
    assert replay("cache-aware", told.decisions) == replay("consistent-hash", told.decisions)
    assert sum(replay("cache-aware", told.decisions).regrets) > 0


def test_predictions_are_held_against_first_tokens(tmp_path: Path) -> None:
    told = read_decisions(logged(tmp_path / "log", (1.0,), (2.0,), seconds=0.3))
    found = calibrated(told.decisions)
    assert found is not None
    assert (found.requests, found.predicted_tokens, found.cached_tokens) == (2, 0, 32)
    assert found.predicted_seconds.mean == pytest.approx(0.15)
    assert found.actual_seconds.mean == pytest.approx(0.3)
    assert found.ratio == pytest.approx(0.5)
    assert found.error_share.p90 == pytest.approx(0.5)


def test_torn_and_foreign_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = logged(tmp_path / "log", (1.0, 2.0))
    whole = path.read_bytes()
    foreign = b'{"type":"decision"}\n[]\nhello\n\xff\xfe\n' + b"[" * 100_000 + b'\n{"type":"dropped","lines":4}\n'
    path.write_bytes(foreign + whole + whole.splitlines()[0][:200])
    told = read_decisions(path)
    assert (len(told.decisions), told.skipped, told.dropped) == (1, 6, 4)
    assert told.decisions[0].first_token is not None


def test_the_older_file_is_read_first(tmp_path: Path) -> None:
    path = tmp_path / "log"
    logged(path, (1.0,)).rename(older(path))
    logged(path, (2.0,))
    assert [decision.chosen.cost_seconds for decision in read_decisions(path).decisions] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("text", "why"), [(b"", "it is empty"), (b"hello\nworld\n", "none of its 2 lines"), (b"\n\n", "it is empty")]
)
def test_a_file_without_a_decision_is_refused_with_the_reason(text: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(text)
    with pytest.raises(DecisionLogEmptyError, match=why):
        read_decisions(path)
    with pytest.raises(SettingsError, match="--decision-log wrote"):
        run(asked(path, tmp_path))


def test_what_cannot_be_asked_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nowhere cannot be read"):
        run(asked(tmp_path / "nowhere", tmp_path))
    with pytest.raises(SettingsError, match="'warmest' is not one of all, cache-aware"):
        run(asked(logged(tmp_path / "log", (1.0,)), tmp_path, policies=("warmest",)))
    with pytest.raises(SettingsError, match="give one of them"):
        asked(tmp_path / "log", tmp_path, trace="x")


def test_the_command_prints_a_table_and_leaves_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = logged(tmp_path / "log", (1.0, 0.25), (0.5, 2.0))
    assert run(asked(path, tmp_path / "out", policies=("all",))) == 0
    printed = capsys.readouterr().out
    assert all(policy in printed for policy in (AS_LOGGED, *POLICIES))
    assert "First tokens of 2 streamed answers: predicted 150 ms, actual 300 ms" in printed
    results = json.loads((tmp_path / "out" / "results.json").read_bytes())
    assert results["policies"]["as logged"]["total_seconds"] == 0.75
    assert results["policies"]["cache-aware"]["regret_seconds"]["mean"] == 0.0
    assert results["setup"]["policies_that_decided"] == {"round-robin": 2}
    report = (tmp_path / "out" / "report.html").read_text()
    assert report.count("<svg") == 2
    assert "consistent-hash" in report
