"""The router's bench from end to end: real processes, a few requests."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from loadtest.bench_router import run
from loadtest.process_figures import cpu_seconds, resident_bytes
from shared.settings import BenchRouterSettings

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")


def test_our_router_and_another_are_measured_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], redis_url: str
) -> None:
    out = tmp_path / "figures.json"
    peer = f"{sys.executable} -m warmroute router --port {{port}} --redis {redis_url} --policy round-robin"
    settings = BenchRouterSettings(
        requests=80, repeats=1, connections=4, redis=redis_url, peer_command=(peer,), out=str(out)
    )
    assert run(settings) == 0
    figures = json.loads(out.read_text())
    assert list(figures) == ["direct", "warmroute", "warmroute 2"]
    for router in ("warmroute", "warmroute 2"):
        assert figures[router]["failed"] == 0
        assert figures[router]["cpu_us"][0] > 0
        assert figures[router]["per_second"][0] > 0
    assert "CPU per request, warmroute / warmroute 2" in capsys.readouterr().out


def test_a_peer_that_does_not_start_is_named(capsys: pytest.CaptureFixture[str], redis_url: str) -> None:
    settings = BenchRouterSettings(requests=80, repeats=1, redis=redis_url, peer_command=("false {port}",))
    assert run(settings) == 1
    assert "false does not answer" in capsys.readouterr().err


def test_a_process_has_used_time_and_memory() -> None:
    assert cpu_seconds(os.getpid()) > 0
    assert resident_bytes(os.getpid()) > 2**20
