"""A fleet of real processes that tests break: Redis, replicas with the simulated engine, routers; and a client.

At the end of each test no process may have logged an error, whatever was done to it and to the others.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

import aiohttp
import pytest

from shared.supervisor import Child, Program
from tests.chaos.answers import Answer, asked
from tests.restartable_redis import RestartableRedis, restartable_redis

_READY_SECONDS = 60.0
_SETTLE_SECONDS = 30.0
_POLL_SECONDS = 0.05
_ENVIRONMENT = {"WARMROUTE_SECRET": ""}
_ERROR = re.compile(r"Z (?:error|critical) |Traceback")
_OPEN_STATES = frozenset({"01", "02", "03", "04", "05", "08", "09", "0B"})
"""Of /proc/net/tcp: all but TIME_WAIT, CLOSE and LISTEN, of which nobody holds a descriptor or all do for ever."""


class Chaos:
    """Replicas are `r1`, `r2` and `r3`; a step of theirs takes 5 ms, unless `replica_flags` say otherwise."""

    def __init__(self, redis: RestartableRedis, log: TextIO, replica_flags: tuple[str, ...]) -> None:
        self.redis = redis
        self.replicas: dict[str, Child] = {}
        self.router: Child
        self.url = ""
        self.client: aiohttp.ClientSession
        """Keeps no connection open: those that are open are a test's own."""
        self._log = log
        self._replica_flags = replica_flags
        self._started: list[Child] = []

    def start_replica(self, name: str, port: int = 0) -> Child:
        flags = ("--engine", "sim", "--id", name, "--blocks", "2048", "--sim-base-seconds", "0.005")
        return self._child(name, "replica", "--port", str(port), *flags, *self._replica_flags)

    def start_router(self, name: str = "router", *flags: str) -> Child:
        # Round robin gives every replica its share, so whatever is done to one is met by requests.
        usual = ("--port", "0", "--policy", "round-robin", "--grace-seconds", "1")
        return self._child(name, "router", *usual, *flags)

    async def start(self) -> None:
        self.replicas = {name: self.start_replica(name) for name in ("r1", "r2", "r3")}
        self.router = self.start_router()
        for child in (*self.replicas.values(), self.router):
            await self.ready(child)
        self.url = self.router.url or ""
        await self.until(lambda fleet: len(accepting(fleet)) == 3, "three replicas known")

    async def ready(self, child: Child) -> str:
        return await asyncio.to_thread(child.wait_ready, _READY_SECONDS)

    async def restart_replica(self, name: str, *, same_address: bool = False) -> None:
        """A new process under the same name."""
        before = self.replicas[name]
        await asyncio.to_thread(before.wait, _READY_SECONDS)
        self.replicas[name] = self.start_replica(name, urlsplit(before.url or "").port or 0 if same_address else 0)
        await self.ready(self.replicas[name])

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.replicas[name].pid, number)

    def kill(self, name: str) -> None:
        self.replicas[name].kill()

    def close(self) -> None:
        for child in self._started:
            child.close()  # a stopped process, too, is killed

    async def ask(self, **wanted: Any) -> Answer:
        return await asked(self.client, self.url, **wanted)

    async def fleet(self, url: str = "") -> dict[str, Any]:
        async with self.client.get((url or self.url) + "/replicas") as response:
            document: dict[str, Any] = await response.json()
            return document

    async def metric(self, name: str, url: str = "") -> float:
        async with self.client.get((url or self.url) + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    async def until(self, reached: Callable[[dict[str, Any]], bool], what: str, url: str = "") -> None:
        """Until `reached(fleet)`, as `GET /replicas` shows it."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while not reached(fleet := await self.fleet(url)):
            assert time.monotonic() < deadline, f"{what}: not reached: {fleet}"
            await asyncio.sleep(_POLL_SECONDS)

    async def settled(self, url: str = "") -> None:
        """Every counter is back at zero: in flight, active, promised seconds of work; and what replicas compute."""

        def idle(fleet: dict[str, Any]) -> bool:
            return all(not each["active"] and not each["wait_seconds"] for each in fleet["replicas"])

        await self.until(idle, "no replica has work", url)
        await self._until_zero(lambda: self.metric("warmroute_router_requests_in_flight", url), "requests in flight")
        await self._until_zero(self._computing, "requests at replicas")

    async def hung_up(self) -> None:
        """Not one connection is open, neither of clients nor to replicas. (Idle ones are kept for a few seconds.)"""
        ports = {port for child in self._started if (port := urlsplit(child.url or "").port)}

        async def connections() -> float:
            return await asyncio.to_thread(_open_connections, ports)

        await self._until_zero(connections, "open connections")

    async def _computing(self) -> float:
        alive = [child.url or "" for child in self.replicas.values() if child.exit_code is None]
        names = ("warmroute_num_requests_running", "warmroute_num_requests_waiting")
        return sum([await self.metric(name, url) for url in alive for name in names])

    async def _until_zero(self, count: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + _SETTLE_SECONDS
        while number := await count():
            assert time.monotonic() < deadline, f"{what}: still {number:g}"
            await asyncio.sleep(_POLL_SECONDS)

    def _child(self, name: str, command: str, *flags: str) -> Child:
        common = ("--redis", self.redis.url, "--log-level", "warning")
        child = Child(Program(name, (command, *flags, *common), _ENVIRONMENT), self._log)
        self._started.append(child)
        return child


def accepting(fleet: dict[str, Any]) -> set[str]:
    return {each["id"] for each in fleet["replicas"] if each["state"] == "accepting"}


def _open_connections(ports: set[int]) -> int:
    """To these local ports."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[1].rpartition(":")[2], 16) in ports and row[3] in _OPEN_STATES for row in rows)


@pytest.fixture
async def chaos(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Chaos]:
    """An indirect parameter is the replicas' further flags."""
    log_path = tmp_path / "log"
    with ExitStack() as stack:
        log = stack.enter_context(log_path.open("w"))
        fleet = Chaos(stack.enter_context(restartable_redis()), log, getattr(request, "param", ()))
        stack.callback(fleet.close)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as client:
            fleet.client = client
            await fleet.start()
            yield fleet
    errors = [line for line in log_path.read_text().splitlines() if _ERROR.search(line)]
    assert not errors, errors[:5]
