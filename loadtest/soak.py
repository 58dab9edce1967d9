"""`make soak`: mixed load on a cluster of our own, with faults, for minutes; the end says what leaks.

clients: streams, whole answers, and some that hang up        faults, one after the other, chosen by the seed:
a sample of the router every second                           a replica killed, a replica frozen, Redis killed
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from loadtest.process_figures import resident_bytes
from loadtest.soak_verdict import Sample, failures
from shared.embedded_redis import RedisServer, start
from shared.supervisor import Child, Program

__all__ = ["main", "soak"]

_REPLICAS = ("r1", "r2", "r3")
_CLIENTS = 12
_PROMPTS = 200
_READY_SECONDS = 60.0
_SETTLE_SECONDS = 30.0
_REPORT_SECONDS = 5
_BETWEEN_FAULTS_SECONDS = 4.0
_FROZEN_SECONDS = 2.0
_ALLOWED_STATUSES = (200, 429, 502, 503, 504)


class _Cluster:
    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._redis_stack = stack.enter_context(ExitStack())
        self._redis: RedisServer = self._redis_stack.enter_context(start())
        self.replicas = {name: self._replica(name) for name in _REPLICAS}
        self.router = self._child("router", "router", "--policy", "cache-aware")
        for child in (*self.replicas.values(), self.router):
            child.wait_ready(_READY_SECONDS)
        self.url = self.router.wait_ready(0)

    def kill_replica(self, name: str) -> None:
        self.replicas[name].close()
        self.replicas[name] = self._replica(name)

    def signal_replica(self, name: str, number: signal.Signals) -> None:
        os.kill(self.replicas[name].pid, number)

    def restart_redis(self) -> None:
        port = urlsplit(self._redis.url).port
        self._redis.kill()
        self._redis_stack.close()
        self._redis = self._redis_stack.enter_context(start(port))

    def _replica(self, name: str) -> Child:
        flags = ("--engine", "sim", "--id", name, "--blocks", "2048", "--sim-base-seconds", "0.005")
        return self._child(name, "replica", *flags)

    def _child(self, name: str, command: str, *flags: str) -> Child:
        common = ("--port", "0", "--redis", self._redis.url, "--log-level", "error")
        child = Child(Program(name, (command, *common, *flags), {"WARMROUTE_SECRET": ""}))
        self._stack.callback(child.close)
        return child


class _Soak:
    def __init__(self, cluster: _Cluster, session: aiohttp.ClientSession, random_: random.Random) -> None:
        self._cluster = cluster
        self._session = session
        self._random = random_
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def client(self) -> None:
        while True:
            try:
                await self._ask()
            except aiohttp.ClientError as error:
                # A whole answer that its replica broke off ends like this: there is no other way to tell.
                self.outcomes[type(error).__name__] += 1

    async def faults(self) -> None:
        while True:
            await asyncio.sleep(_BETWEEN_FAULTS_SECONDS)
            name = self._random.choice(_REPLICAS)
            fault = self._random.choice(("kill", "freeze", "redis"))
            self.outcomes[fault] += 1
            if fault == "kill":
                await asyncio.to_thread(self._cluster.kill_replica, name)
                await asyncio.to_thread(self._cluster.replicas[name].wait_ready, _READY_SECONDS)
            elif fault == "redis":
                await asyncio.to_thread(self._cluster.restart_redis)
            else:
                self._cluster.signal_replica(name, signal.SIGSTOP)
                try:
                    await asyncio.sleep(_FROZEN_SECONDS)
                finally:
                    self._cluster.signal_replica(name, signal.SIGCONT)

    async def sample(self) -> Sample:
        pid = self._cluster.router.pid
        async with self._session.get(self._cluster.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        in_flight = next(
            float(line.split()[1]) for line in lines if line.startswith("warmroute_router_requests_in_flight ")
        )
        async with self._session.get(self._cluster.url + "/replicas") as response:
            replicas = (await response.json())["replicas"]
        process = Path(f"/proc/{pid}")
        descriptors, threads = (sum(1 for _ in (process / folder).iterdir()) for folder in ("fd", "task"))
        return Sample(resident_bytes(pid), descriptors, threads, in_flight, sum(each["active"] for each in replicas))

    async def joined(self) -> None:
        """Once the router knows all replicas. Raises TimeoutError."""
        async with asyncio.timeout(_SETTLE_SECONDS):
            accepting = 0
            while accepting < len(_REPLICAS):
                await asyncio.sleep(0.1)
                async with self._session.get(self._cluster.url + "/replicas") as response:
                    replicas = (await response.json())["replicas"]
                accepting = sum(each["state"] == "accepting" for each in replicas)

    async def settled(self) -> Sample:
        """The sample once nothing is under way, or the last one before patience ends."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            sample = await self.sample()
            if not (sample.in_flight or sample.active) or time.monotonic() > deadline:
                return sample
            await asyncio.sleep(0.1)

    async def _ask(self) -> None:
        stream, leaves = self._random.random() < 0.7, self._random.random() < 0.2
        text = f"prompt {self._random.randrange(_PROMPTS)} " * 40
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 24, "stream": stream}
        patience = self._random.uniform(0.005, 0.2) if leaves else 60.0
        try:
            async with asyncio.timeout(patience):
                async with self._session.post(self._cluster.url + "/v1/chat/completions", json=body) as response:
                    answer = await response.read()
        except TimeoutError:
            self.outcomes["left" if leaves else "timed out"] += 1
            if not leaves:
                self.wrong.append("a request was not answered within 60 s")
            return
        self.outcomes[str(response.status)] += 1
        if response.status not in _ALLOWED_STATUSES:
            self.wrong.append(f"a request was answered with status {response.status}")
        elif response.status == 200 and stream and not answer.endswith(b"data: [DONE]\n\n"):
            self.wrong.append("a stream ended without its last event")


async def soak(seconds: float, seed: int, say: Callable[[str], object]) -> list[str]:
    """What failed, one sentence each; progress goes to `say`."""
    with ExitStack() as stack:
        cluster = await asyncio.to_thread(_Cluster, stack)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            run = _Soak(cluster, session, random.Random(seed))
            await run.joined()
            before = await run.settled()
            tasks = [asyncio.create_task(run.client()) for _ in range(_CLIENTS)]
            tasks.append(asyncio.create_task(run.faults()))
            samples: list[Sample] = []
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                await asyncio.sleep(1)
                samples.append(sample := await run.sample())
                if len(samples) % _REPORT_SECONDS == 0:
                    say(f"{len(samples):4} s  {sample.resident_bytes / 2**20:.1f} MiB  {sample}  {dict(run.outcomes)}")
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task
            after = await run.settled()
        return [*failures(before, samples, after), *dict.fromkeys(run.wrong)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    given = parser.parse_args(arguments)
    sys.stdout.write(f"seed {given.seed}\n")
    found = asyncio.run(soak(given.seconds, given.seed, lambda line: print(line, flush=True)))  # noqa: T201
    for sentence in found:
        sys.stdout.write(f"FAILED: {sentence}\n")
    if not found:
        sys.stdout.write("nothing leaks, and everyone was answered\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
