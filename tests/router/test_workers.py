"""Several processes on one port are one router: in what they serve, in what they say, and in how they end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from router.fleet import Fleet
from router.workers import CannotShareError, Workers, share
from shared.settings import RouterSettings
from tests.fleet_members import make_record
from tests.helpers import eventually, wait_until
from tests.router.conftest import chat
from tests.router.fake_replica import FakeReplica, open_stream
from tests.router.test_app import program, ready_url

pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="needs SO_REUSEPORT")

COUNT = 2
Series = dict[str, float]


async def repeatedly(ask: Callable[[], Awaitable[object]], wanted: object) -> None:
    """Until that is the answer."""
    async with asyncio.timeout(20):
        told = await ask()
        while told != wanted:
            await asyncio.sleep(0.02)
            told = await ask()


class Cluster:
    """A router of two workers over one fake replica. Each request comes on a connection of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str, replica: FakeReplica) -> None:
        self.process = process
        self.url = url
        self.replica = replica
        self.client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0))

    @property
    def pids(self) -> set[int]:
        return {child.pid for child in psutil.Process(self.process.pid).children()}

    async def get(self, path: str) -> Any:
        async with self.client.get(self.url + path) as response:
            return await response.json()

    async def status(self, path: str) -> int:
        async with self.client.get(self.url + path) as response:
            return response.status

    async def drain(self, verb: str = "drain") -> None:
        async with self.client.post(f"{self.url}/replicas/{self.replica.id}/{verb}") as response:
            assert response.status == 200

    async def by_worker(self, name: str) -> Series:
        """The sum of all series of that name, by worker."""
        async with self.client.get(self.url + "/metrics") as response:
            text = await response.text()
        sums: Series = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name:
                    worker = sample.labels["worker"]
                    sums[worker] = sums.get(worker, 0.0) + sample.value
        return sums

    async def until(self, name: str, wanted: dict[str, float]) -> None:
        await repeatedly(lambda: self.by_worker(name), wanted)

    async def until_ready(self) -> None:
        """Both workers have found the replica."""
        await self.until("warmroute_router_replica_accepting", {"0": 1.0, "1": 1.0})


@asynccontextmanager
async def cluster(*arguments: str) -> AsyncIterator[Cluster]:
    async with FakeReplica() as replica:
        flags = ("--port", "0", "--workers", str(COUNT), "--replica", replica.url, *arguments)
        with program(*flags) as process:
            started = Cluster(process, await asyncio.to_thread(ready_url, process), replica)
            try:
                await started.until_ready()
                yield started
            finally:
                await started.client.close()


class Held:
    """Streams that have begun and end when `release` is set."""

    def __init__(self, cluster: Cluster, count: int) -> None:
        self.release = asyncio.Event()
        cluster.replica.behave = self._behave
        self.answers = [asyncio.ensure_future(self._ask(cluster)) for _ in range(count)]

    async def _behave(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(b"data: 1\n\n")
        await self.release.wait()
        await response.write(b"data: 2\n\n")
        await response.write_eof()
        return response

    async def _ask(self, cluster: Cluster) -> bytes:
        async with cluster.client.post(cluster.url + "/v1/chat/completions", json=chat()) as response:
            assert response.status == 200
            return await response.read()


async def test_what_all_have_served_is_told_by_any_and_adds_up() -> None:
    async with cluster() as c:
        requests = 40
        for _ in range(requests):
            async with c.client.post(c.url + "/v1/chat/completions", json=chat()) as response:
                assert response.status == 200
                await response.read()
        served = await c.by_worker("warmroute_router_requests_total")
        assert sum(served.values()) == requests
        assert served.keys() == {"0", "1"}  # the kernel dealt out forty connections to both
        shown = await c.get("/dashboard/data")
        assert (shown["workers"], len(shown["recent"])) == (COUNT, requests)
        assert [replica["requests"] for replica in shown["replicas"]] == [requests]
        assert (await c.by_worker("process_resident_memory_bytes")).keys() == {"0", "1"}


async def test_a_worker_that_is_killed_takes_its_own_streams_along_and_comes_back() -> None:
    async with cluster() as c:
        held = Held(c, 24)
        await eventually(lambda: c.replica.active == 24, what="all streams open")
        before = c.pids
        in_flight = await c.by_worker("warmroute_router_requests_in_flight")
        births = await c.by_worker("process_start_time_seconds")
        killed = psutil.Process(min(before))
        number = min(births, key=lambda worker: abs(births[worker] - killed.create_time()))
        killed.kill()
        await eventually(lambda: len(c.pids) == COUNT and killed.pid not in c.pids, what="a new worker")
        await c.until_ready()
        held.release.set()
        ends = await asyncio.gather(*held.answers, return_exceptions=True)
        broken = [end for end in ends if isinstance(end, aiohttp.ClientError)]
        assert len(broken) == in_flight[number]
        assert [end for end in ends if end not in broken] == [b"data: 1\n\ndata: 2\n\n"] * (24 - len(broken))
        for _ in range(12):
            async with c.client.post(c.url + "/v1/chat/completions", json=chat()) as response:
                assert response.status == 200
        c.process.send_signal(signal.SIGTERM)
        _, log = await asyncio.to_thread(c.process.communicate, timeout=20)
    assert f"a worker ended by itself: it is started again worker={number} status=-9" in log


async def test_sigterm_drains_all_and_the_last_stream_is_not_cut() -> None:
    async with cluster() as c:
        held = Held(c, 12)
        await eventually(lambda: c.replica.active == 12, what="all streams open")
        c.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            answers = [200]
            while 200 in answers:
                answers = [(await c.client.get(c.url + "/ready")).status for _ in range(8)]
        held.release.set()
        assert await asyncio.gather(*held.answers) == [b"data: 1\n\ndata: 2\n\n"] * 12
        assert await asyncio.to_thread(c.process.wait, 10) == 0


async def test_told_twice_it_waits_for_nobody() -> None:
    async with cluster() as c:
        held = Held(c, 8)
        await eventually(lambda: c.replica.active == 8, what="all streams open")
        c.process.send_signal(signal.SIGTERM)
        await repeatedly(lambda: c.status("/ready"), 503)
        c.process.send_signal(signal.SIGINT)
        for end in await asyncio.gather(*held.answers):
            assert b"shutting_down" in end
        assert await asyncio.to_thread(c.process.wait, 10) == 0
        held.release.set()


async def test_a_replica_that_is_drained_is_so_for_all_and_for_a_worker_that_comes_later() -> None:
    async with cluster() as c:
        accepting = "warmroute_router_replica_accepting"
        await c.drain()
        await c.until(accepting, {"0": 0.0, "1": 0.0})
        killed = psutil.Process(min(c.pids))
        killed.kill()
        await eventually(lambda: len(c.pids) == COUNT and killed.pid not in c.pids, what="a new worker")
        await c.until(accepting, {"0": 0.0, "1": 0.0})
        assert {replica["state"] for replica in (await c.get("/replicas"))["replicas"]} == {"draining"}
        await c.drain("undrain")
        await c.until(accepting, {"0": 1.0, "1": 1.0})


async def test_no_worker_outlives_its_parent() -> None:
    async with cluster() as c:
        workers = [psutil.Process(pid) for pid in c.pids]
        c.process.kill()
        await eventually(lambda: not any(worker.is_running() for worker in workers), what="workers gone")


async def test_keys_are_read_again_by_all(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    entry = '[[key]]\nkey = "{}"\ntenant = "acme"\n'
    old, new = "sk-old-0123456789abcdef", "sk-new-0123456789abcdef"
    file.write_text(entry.format(old))

    async def statuses(key: str) -> set[int]:
        headers = {"authorization": f"Bearer {key}"}
        asked = [c.client.post(c.url + "/route", json=chat(), headers=headers) for _ in range(12)]
        return {response.status for response in await asyncio.gather(*asked)}

    async with cluster("--api-keys", str(file)) as c:
        assert await statuses(old) == {200}
        file.write_text(entry.format(new))
        c.process.send_signal(signal.SIGHUP)
        await repeatedly(lambda: statuses(new), {200})
        assert await statuses(old) == {401}


def test_a_port_of_other_workers_is_taken() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        with program("--port", port, "--workers", "2", "--log-level", "error") as process:
            out, log = process.communicate(timeout=20)
    assert (process.returncode, out, log.count("\n")) == (1, "", 1)
    assert f"cannot listen on 127.0.0.1:{port}" in log


def test_what_no_worker_could_use_is_said_once(tmp_path: Path) -> None:
    with program(
        "--port", "0", "--workers", "2", "--log-level", "error", "--api-keys", str(tmp_path / "no")
    ) as process:
        out, log = process.communicate(timeout=20)
    assert (process.returncode, out, log.count("\n")) == (2, "", 1)


def test_workers_that_cannot_start_end_it_with_their_status(tmp_path: Path) -> None:
    """The parent does not open this log: only workers meet it."""
    log = tmp_path / "no such folder" / "decisions.jsonl"
    with program("--port", "0", "--workers", "2", "--decision-log", str(log)) as process:
        out, told = process.communicate(timeout=20)
    assert (process.returncode, out) == (2, "")
    assert "decisions-" in told


def test_sighup_while_workers_start_harms_nobody() -> None:
    with program("--port", "0", "--workers", "2") as process:
        parent = psutil.Process(process.pid)
        wait_until(lambda: len(parent.children()) == 2, what="workers begun")
        process.send_signal(signal.SIGHUP)
        ready_url(process)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "ended by itself" not in log


def test_stopped_while_workers_start_it_ends_in_order() -> None:
    with program("--port", "0", "--workers", "2") as process:
        parent = psutil.Process(process.pid)
        wait_until(lambda: len(parent.children()) == 2, what="workers begun")
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "")
    assert "ended by itself" not in log


def test_where_sockets_cannot_be_named_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    with program("--port", "0", "--workers", "2", "--log-level", "error") as process:
        out, log = process.communicate(timeout=20)
    assert (process.returncode, out, log.count("\n")) == (2, "", 1)
    assert "set TMPDIR" in log


def test_where_a_port_cannot_be_shared_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "SO_REUSEPORT")
    with pytest.raises(CannotShareError, match="run several routers behind a load balancer"):
        Workers(RouterSettings(workers=2))


def test_without_redis_it_is_said_once_that_workers_do_not_know_each_others_work() -> None:
    with program("--port", "0", "--workers", "2") as process:
        ready_url(process)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
    assert log.count("each worker knows its own work alone") == 1
    wait_until(lambda: not _alive(process.pid))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_limits_are_shared_and_never_nothing() -> None:
    settings = RouterSettings(workers=4, max_in_flight=10, max_queue=0, decision_log="/logs/decisions.jsonl")
    own = share(settings, 8000, 3)
    assert (own.port, own.workers, own.max_in_flight, own.max_queue) == (8000, 1, 3, 0)
    assert own.decision_log == "/logs/decisions-3.jsonl"
    assert share(RouterSettings(workers=4, max_in_flight=1), 8000, 0).max_in_flight == 1


def test_a_drain_is_adopted_before_the_replica_is_known_and_not_for_its_successor() -> None:
    asked, learning = Fleet(), Fleet()
    asked.update(make_record(started_at=5.0), 0.0)
    asked.drain("r1")
    asked.add_static("http://here:1")
    asked.drain("here:1")
    learning.add_static("http://here:1")
    learning.adopt_drains(asked.drains())
    assert learning.update(make_record(started_at=5.0), 0.0).state == "draining"
    assert [replica.state for replica in learning if replica.source == "static"] == ["draining"]
    later = Fleet()
    later.adopt_drains(asked.drains())
    assert later.update(make_record(started_at=6.0), 0.0).state == "accepting"
