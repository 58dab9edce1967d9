"""`warmroute up`: a real cluster from one command, and nothing left of it afterwards, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.local_cluster import RunningUp, alive, descendants, running_up
from tests.helpers import wait_until

_SIM = ("--engine", "sim", "--replicas", "2", "--port", "0", "--log-level", "warning")


@pytest.fixture
def up() -> Iterator[RunningUp]:
    with running_up(*_SIM) as running:
        running.wait_ready()
        yield running


def _get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=10) as response:
        document: dict[str, Any] = json.load(response)
    return document


def _accepting(router: str) -> dict[str, str]:
    return {one["id"]: one["url"] for one in _get(f"{router}/replicas")["replicas"] if one["state"] == "accepting"}


def _epochs(router: str) -> set[int]:
    return {one["epoch"] for one in _get(f"{router}/replicas")["replicas"]}


def _process_of(up: RunningUp, argument: str) -> tuple[int, str]:
    """The one child that was started with this argument."""
    children = descendants(up.process.pid)
    (found,) = (child for child in children if argument in Path(f"/proc/{child[0]}/cmdline").read_text().split("\0"))
    return found


def test_a_conversation_stays_on_its_replica_and_hits_the_cache_then_ctrl_c_leaves_nothing(up: RunningUp) -> None:
    router = up.wait_ready()
    processes = descendants(up.process.pid)
    assert len(processes) >= 4  # two replicas, a router, a Redis
    with openai.OpenAI(base_url=f"{router}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "tell me a story " * 40}]
        first = client.chat.completions.with_raw_response.create(model="tiny", messages=messages, max_tokens=24)
        answer = first.parse().choices[0].message.content
        assert answer
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and then?"}]

        def cached_tokens() -> int:
            again = client.chat.completions.with_raw_response.create(model="tiny", messages=messages, max_tokens=4)
            assert again.headers["x-warmroute-replica"] == first.headers["x-warmroute-replica"]
            return int(again.headers["x-warmroute-cached-tokens"])

        wait_until(lambda: cached_tokens() > 100, what="a hit on the first turn's blocks")
        stream = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    up.interrupt()
    assert up.wait() == 0
    assert up.stdout == [f"ready {router}\n"]
    assert alive(processes) == set()


def test_killed_outright_it_takes_its_children_along(up: RunningUp) -> None:
    processes = descendants(up.process.pid)
    up.process.kill()
    up.wait()
    wait_until(lambda: not alive(processes), what="the end of all children")


def test_a_replica_that_dies_is_started_again_and_found_by_the_router(up: RunningUp) -> None:
    router = up.wait_ready()
    before = _accepting(router)
    os.kill(_process_of(up, "--id=replica-1")[0], signal.SIGKILL)

    def joined_anew() -> bool:
        now = _accepting(router)
        return now.keys() == before.keys() and now["replica-1"] != before["replica-1"]

    wait_until(joined_anew, 30, what="the replica's return")
    assert any("started again" in line and "replica-1" in line for line in up.stderr)


def test_a_router_that_dies_is_started_again_where_it_was(up: RunningUp) -> None:
    router = up.wait_ready()
    process = _process_of(up, "router")
    os.kill(process[0], signal.SIGKILL)

    def serves_again() -> bool:
        try:
            return not alive({process}) and len(_accepting(router)) == 2
        except OSError:
            return False

    wait_until(serves_again, 30, what="the router's return")


def test_its_own_redis_is_started_again_and_learns_what_the_replicas_hold(up: RunningUp) -> None:
    router = up.wait_ready()
    before = descendants(up.process.pid)
    (server,) = (child for child in before if "-server 127.0.0.1:" in Path(f"/proc/{child[0]}/cmdline").read_text())
    epochs = _epochs(router)
    os.kill(server[0], signal.SIGKILL)
    wait_until(lambda: not epochs & _epochs(router), 30, what="all published anew, and read")
    wait_until(lambda: _get(f"{router}/replicas")["view"] == "exact" and len(_accepting(router)) == 2, 30, what="Redis")
    assert any("Redis ended and is started again" in line for line in up.stderr)
    processes = before | descendants(up.process.pid)
    up.interrupt()
    assert up.wait() == 0
    assert alive(processes) == set()


def test_a_signal_before_all_is_ready_ends_it_in_order() -> None:
    with running_up(*_SIM) as starting:
        wait_until(lambda: len(descendants(starting.process.pid)) >= 3, what="the first children")
        processes = descendants(starting.process.pid)
        starting.interrupt()
        assert starting.wait() == 0
        assert starting.stdout == []
        assert alive(processes) == set()


@pytest.mark.parametrize(("grace_seconds", "signals", "exit_code"), [("0.2", 1, 0), ("600", 2, 130)])
def test_a_child_that_does_not_stop_is_killed_after_the_grace_time_or_at_a_second_signal(
    grace_seconds: str, signals: int, exit_code: int
) -> None:
    with running_up(*_SIM, "--grace-seconds", grace_seconds) as up:
        up.wait_ready()
        processes, router = descendants(up.process.pid), _process_of(up, "router")
        os.kill(_process_of(up, "--id=replica-2")[0], signal.SIGSTOP)
        up.interrupt()
        wait_until(lambda: not alive({router}), 30, what="the router's end")
        if signals == 2:
            up.interrupt()
        assert up.wait() == exit_code
        assert alive(processes) == set()


def test_a_replica_that_cannot_start_ends_it_with_the_reason() -> None:
    with running_up(*_SIM, "--engine", "torch", "--model", "/nowhere/model") as starting:
        wait_until(lambda: len(descendants(starting.process.pid)) >= 3, what="the first children")
        processes = descendants(starting.process.pid)
        assert starting.wait() == 1
        assert starting.stdout == []
        assert starting.stderr[-1].startswith("warmroute up: replica-")
        assert "/nowhere/model" in starting.stderr[-1]
        assert alive(processes) == set()


def test_route_and_top_show_the_cluster(up: RunningUp) -> None:
    router = up.wait_ready()
    for arguments, shown in (
        (["route", "hello there", "--router", router], ("replica-1", "replica-2", "prompt tokens cached")),
        (["top", "--once", "--router", router], ("replica-1", "replica-2", "accepting", "cache-aware")),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "warmroute", *arguments],
            env={**os.environ, "COLUMNS": "160"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        for text in shown:
            assert text in done.stdout
