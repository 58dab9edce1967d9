"""A fleet of real processes that tests break: Redis, replicas with the simulated engine, a router; and a client."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import aiohttp
import pytest

from shared.supervisor import Child, Program
from tests.restartable_redis import RestartableRedis, restartable_redis

_READY_SECONDS = 60.0
_SETTLE_SECONDS = 30.0
_POLL_SECONDS = 0.05
_ENVIRONMENT = {"WARMROUTE_SECRET": ""}


class Chaos:
    """Replicas are `r1`, `r2` and `r3`; a step of theirs takes 5 ms."""

    def __init__(self, redis: RestartableRedis, log: TextIO) -> None:
        self.redis = redis
        self.replicas: dict[str, Child] = {}
        self.router: Child
        self.url = ""
        self.client: aiohttp.ClientSession
        self._log = log
        self._started: list[Child] = []

    def start_replica(self, name: str) -> Child:
        flags = ("--engine", "sim", "--id", name, "--blocks", "2048", "--sim-base-seconds", "0.005")
        return self._child(name, "replica", *flags)

    def start_router(self) -> Child:
        # Round robin gives every replica its share, so whatever is done to one is met by requests.
        return self._child("router", "router", "--policy", "round-robin", "--grace-seconds", "1")

    async def start(self) -> None:
        self.replicas = {name: self.start_replica(name) for name in ("r1", "r2", "r3")}
        self.router = self.start_router()
        for child in (*self.replicas.values(), self.router):
            await self._ready(child)
        self.url = self.router.url or ""
        await self.until(lambda fleet: len(accepting(fleet)) == 3, "three replicas known")

    async def restart_replica(self, name: str) -> None:
        self.replicas[name] = self.start_replica(name)
        await self._ready(self.replicas[name])

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.replicas[name].pid, number)

    def kill(self, name: str) -> None:
        self.replicas[name].kill()

    def close(self) -> None:
        for child in self._started:
            child.close()  # a stopped process, too, is killed

    async def ask(self, *, stream: bool = True, tokens: int = 20, number: int = 0) -> Answer:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"request {number} " * 30}],
            "max_tokens": tokens,
            "stream": stream,
        }
        async with self.client.post(self.url + "/v1/chat/completions", json=body) as response:
            return Answer(response.status, response.headers.get("x-warmroute-replica", ""), await response.read())

    async def fleet(self) -> dict[str, Any]:
        async with self.client.get(self.url + "/replicas") as response:
            document: dict[str, Any] = await response.json()
            return document

    async def in_flight(self) -> float:
        async with self.client.get(self.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("warmroute_router_requests_in_flight "))

    async def until(self, reached: Callable[[dict[str, Any]], bool], what: str) -> None:
        """Until `reached(fleet)`, as `GET /replicas` shows it."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while not reached(fleet := await self.fleet()):
            assert time.monotonic() < deadline, f"{what}: not reached: {fleet}"
            await asyncio.sleep(_POLL_SECONDS)

    async def settled(self) -> None:
        """Every counter is back at zero: in flight, active, promised seconds of work."""

        def idle(fleet: dict[str, Any]) -> bool:
            return all(not each["active"] and not each["wait_seconds"] for each in fleet["replicas"])

        await self.until(idle, "no replica has work")
        deadline = time.monotonic() + _SETTLE_SECONDS
        while count := await self.in_flight():
            assert time.monotonic() < deadline, f"{count} requests are still in flight"
            await asyncio.sleep(_POLL_SECONDS)

    def _child(self, name: str, command: str, *flags: str) -> Child:
        common = ("--port", "0", "--redis", self.redis.url, "--log-level", "warning")
        child = Child(Program(name, (command, *common, *flags), _ENVIRONMENT), self._log)
        self._started.append(child)
        return child

    async def _ready(self, child: Child) -> None:
        await asyncio.to_thread(child.wait_ready, _READY_SECONDS)


class Answer:
    """`whole`: to its last byte as it should be. `told`: broken off, and the stream says so as the API does."""

    def __init__(self, status: int, replica: str, body: bytes) -> None:
        self.status = status
        self.replica = replica
        self.body = body
        self.told = status == 200 and b'"error"' in body and b'"replica_failed"' in body
        ended = body.endswith((b"data: [DONE]\n\n", b"}"))
        self.whole = status == 200 and ended and b'"error"' not in body


def accepting(fleet: dict[str, Any]) -> set[str]:
    return {each["id"] for each in fleet["replicas"] if each["state"] == "accepting"}


@pytest.fixture
async def chaos(tmp_path: Path) -> AsyncIterator[Chaos]:
    with ExitStack() as stack:
        log = stack.enter_context((tmp_path / "log").open("w"))
        fleet = Chaos(stack.enter_context(restartable_redis()), log)
        stack.callback(fleet.close)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            fleet.client = client
            await fleet.start()
            yield fleet
