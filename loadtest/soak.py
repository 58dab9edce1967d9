"""`make soak`: mixed load on a cluster of our own, with faults, for minutes; the end says what leaks or went wrong.

clients: all three APIs, streams and whole answers, and some that hang up
faults:  one after the other, chosen by the seed: a replica killed, frozen or stopped, Redis killed or frozen.
         Each is on until the fleet is whole again; then for a while there is none, and nothing may fail.
a sample of the router every second; at the end, once nothing is under way, nothing may be left
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from loadtest.process_figures import resident_bytes
from loadtest.soak_cluster import REPLICAS, SoakCluster
from loadtest.soak_verdict import Fault, Reply, Sample, failures, leaks

__all__ = ["main", "soak"]

_CLIENTS = 12
_PROMPTS = 200
_PATIENCE_SECONDS = 60.0
_SETTLE_SECONDS = 30.0
_HEAL_SECONDS = 60.0
_REPORT_SECONDS = 5
_CALM_SECONDS = 4.0
_POLL_SECONDS = 0.1
_STUMBLE_SECONDS = 2.0
_LONGER_THAN_A_LEASE_SECONDS = 7.0
_PATHS = ("/v1/chat/completions", "/v1/chat/completions", "/v1/messages", "/v1/completions")
_LAST_EVENTS = (b"data: [DONE]\n\n", b'{"type":"message_stop"}\n\n')


class _Soak:
    def __init__(self, cluster: SoakCluster, session: aiohttp.ClientSession, random_: random.Random) -> None:
        self._cluster = cluster
        self._session = session
        self._random = random_
        self.replies: list[Reply] = []
        """Those that were not whole; all are counted in `outcomes`."""
        self.faults: list[Fault] = []
        self.outcomes: Counter[str] = Counter()

    async def client(self) -> None:
        while True:
            began = time.monotonic()
            outcome = await self._ask()
            self.outcomes[outcome] += 1
            if outcome not in ("ok", "left"):
                self.replies.append(Reply(outcome, began, time.monotonic()))

    async def break_things(self) -> None:
        while True:
            await asyncio.sleep(_CALM_SECONDS)
            name, do = self._choose_fault()
            self.outcomes[name] += 1
            self.faults.append(fault := Fault(name, time.monotonic()))
            await asyncio.to_thread(do)
            await self.heal(fault)

    async def heal(self, fault: Fault) -> None:
        fault.missing = await self.whole()
        if not fault.missing:
            fault.ended = time.monotonic()

    async def whole(self) -> str:
        """Empty once the router takes all replicas and knows all they hold; after some patience, what is missing."""
        deadline = time.monotonic() + _HEAL_SECONDS
        missing = _missing(await self._fleet())
        while missing and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
            missing = _missing(await self._fleet())
        return missing

    async def sample(self) -> Sample:
        pid = self._cluster.router.pid
        async with self._session.get(self._cluster.url + "/metrics") as response:
            figures = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[0] != "#")
        active = sum(each["active"] for each in (await self._fleet())["replicas"])
        process = Path(f"/proc/{pid}")
        return Sample(
            resident_bytes=resident_bytes(pid),
            descriptors=sum(1 for _ in (process / "fd").iterdir()),
            threads=sum(1 for _ in (process / "task").iterdir()),
            tasks=float(figures["warmroute_router_tasks"]),
            in_flight=float(figures["warmroute_router_requests_in_flight"]),
            active=active,
        )

    async def settled(self) -> Sample:
        """The sample once nothing is under way and connections kept for nobody are closed, or after some patience."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        sample = await self.sample()
        while (sample.in_flight or sample.active) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
            sample = await self.sample()
        return sample

    async def _fleet(self) -> dict[str, Any]:
        async with self._session.get(self._cluster.url + "/replicas") as response:
            fleet: dict[str, Any] = await response.json()
            return fleet

    def _choose_fault(self) -> tuple[str, Callable[[], None]]:
        cluster, replica = self._cluster, self._random.choice(REPLICAS)
        faults: tuple[tuple[str, Callable[[], None]], ...] = (
            (f"kill {replica}", partial(cluster.kill_replica, replica)),
            (f"freeze {replica}", partial(cluster.freeze_replica, replica, _LONGER_THAN_A_LEASE_SECONDS)),
            (f"let {replica} stumble", partial(cluster.freeze_replica, replica, _STUMBLE_SECONDS)),
            (f"stop {replica}", partial(cluster.stop_replica, replica)),
            ("kill redis", cluster.kill_redis),
            ("freeze redis", partial(cluster.freeze_redis, _STUMBLE_SECONDS)),
        )
        return self._random.choice(faults)

    async def _ask(self) -> str:
        """How it ended: see `Reply`."""
        stream, leaves = self._random.random() < 0.7, self._random.random() < 0.2
        path = self._random.choice(_PATHS)
        text = f"prompt {self._random.randrange(_PROMPTS)} " * self._random.choice((20, 40, 160))
        prompt = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
        body = {"model": "tiny", "max_tokens": self._random.choice((1, 24, 60)), "stream": stream, **prompt}
        patience = self._random.uniform(0.005, 0.3) if leaves else _PATIENCE_SECONDS
        try:
            async with asyncio.timeout(patience):
                async with self._session.post(self._cluster.url + path, json=body) as response:
                    answer = await response.read()
        except TimeoutError:
            return "left" if leaves else "late"
        except aiohttp.ClientError:
            return "cut"
        if response.status != 200:
            return str(response.status)
        if b'"error"' in answer:
            return "told"
        return "ok" if answer.endswith(_LAST_EVENTS if stream else b"}") else "incomplete"


async def soak(seconds: float, seed: int, say: Callable[[str], object], clients: int = _CLIENTS) -> list[str]:
    """What failed, one sentence each; progress goes to `say`."""
    with await asyncio.to_thread(SoakCluster().__enter__) as cluster:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            run = _Soak(cluster, session, random.Random(seed))
            await run.whole()
            before = await run.settled()
            load = [asyncio.create_task(run.client()) for _ in range(clients)]
            breaking = asyncio.create_task(run.break_things())
            samples: list[Sample] = []
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                await asyncio.sleep(1)
                samples.append(sample := await run.sample())
                if len(samples) % _REPORT_SECONDS == 0:
                    say(f"{len(samples):4} s  {sample.resident_bytes / 2**20:.1f} MiB  {sample}  {dict(run.outcomes)}")
            await _cancelled(breaking)
            if run.faults and run.faults[-1].ended == float("inf"):
                await run.heal(run.faults[-1])  # under load: that is what closes breakers
            for task in load:
                await _cancelled(task)
            after = await run.settled()
            logged = await asyncio.to_thread(cluster.logged)
    return [*leaks(before, samples, after), *failures(run.replies, run.faults, logged)]


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _missing(fleet: dict[str, Any]) -> str:
    states = {each["id"]: (each["state"], each["breaker"]) for each in fleet["replicas"]}
    well = [("accepting", "closed"), ("accepting", "half-open")]  # the latter takes work, if there is some for it
    wrong = [f"{name} is {states.get(name, 'gone')}" for name in REPLICAS if states.get(name) not in well]
    if fleet["view"] != "exact":
        wrong.append(f"the view is {fleet['view']}")
    return ", ".join(wrong)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=_CLIENTS)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    given = parser.parse_args(arguments)
    sys.stdout.write(f"seed {given.seed}\n")
    say = partial(print, flush=True)
    found = asyncio.run(soak(given.seconds, given.seed, say, given.clients))
    for sentence in found:
        sys.stdout.write(f"FAILED: {sentence}\n")
    if not found:
        sys.stdout.write("nothing leaks, and everyone was answered\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
