"""A replica from its first breath to its last: listening, loading, draining, leaving."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import redis

import replica.server
from replica.backend import Backend, load_backend
from replica.server import ReplicaServer
from shared.fleet_records import decode_record
from shared.settings import ReplicaSettings
from tests.helpers import eventually
from tests.replica.sim_server import CHAT, FAST, HELLO, serving

LONG = HELLO | {"max_tokens": 4000, "stream": True}
PROGRAM = """
import json, sys
from replica.server import run
from shared.settings import ReplicaSettings
raise SystemExit(run(ReplicaSettings(**json.loads(sys.argv[1]))))
"""


def command(**settings: Any) -> list[str]:
    return [sys.executable, "-c", PROGRAM, json.dumps(FAST | settings)]


class Process:
    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    async def exit(self) -> tuple[int, str]:
        _, errors = await asyncio.wait_for(self.process.communicate(), 15)
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()


@pytest.fixture
async def process() -> AsyncIterator[Process]:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command(grace_seconds=20), stdout=pipe, stderr=pipe)
    try:
        assert child.stdout is not None
        line = (await asyncio.wait_for(child.stdout.readline(), 20)).decode()
        assert line.startswith("ready http://127.0.0.1:")
        yield Process(child, line.split()[1])
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def test_health_answers_while_the_model_loads_and_ready_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    may_load = threading.Event()

    def slow_load(settings: ReplicaSettings) -> Backend:
        assert may_load.wait(20)
        return load_backend(settings)

    monkeypatch.setattr(replica.server, "load_backend", slow_load)
    server = ReplicaServer(ReplicaSettings(**FAST))
    await server.listen()
    loading = asyncio.ensure_future(server.load())
    try:
        async with aiohttp.ClientSession(server.url) as client:
            async with client.get("/health") as response:
                assert response.status == 200
            for request in (client.get("/ready"), client.post(CHAT, json=HELLO), client.get("/cache")):
                async with request as response:
                    assert response.status == 503
                    assert response.headers["Retry-After"]
                    assert (await response.json())["error"]["code"] == "not_ready"
            may_load.set()
            await loading
            async with client.get("/ready") as response:
                assert response.status == 200
            async with client.post(CHAT, json=HELLO) as response:
                assert response.status == 200
    finally:
        may_load.set()
        await server.stop(0)


async def test_a_drained_replica_finishes_its_streams_and_takes_no_more() -> None:
    async with serving() as (server, client):
        async with client.post(CHAT, json=LONG | {"max_tokens": 500}) as stream:
            await stream.content.readany()
            stopping = asyncio.ensure_future(server.stop(grace_seconds=20))
            await asyncio.sleep(0)
            for request in (client.get("/ready"), client.post(CHAT, json=HELLO)):
                async with request as response:
                    assert response.status == 503
                    assert response.headers["Retry-After"]
            assert (await stream.read()).endswith(b"data: [DONE]\n\n")
        await stopping


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_when_the_grace_is_over_a_stream_ends_with_a_clear_error(path: str) -> None:
    async with serving(sim_base_seconds=0.01) as (server, client), client.post(path, json=LONG) as stream:
        await stream.content.readany()
        await server.stop(grace_seconds=0.05)
        end = await stream.read()
    assert b"shutting down" in end
    assert end.endswith(b"data: [DONE]\n\n") is (path == CHAT)


async def test_a_signal_drains_and_exits_in_order(process: Process) -> None:
    body = LONG | {"max_tokens": 300}
    async with aiohttp.ClientSession(process.url) as client, client.post(CHAT, json=body) as stream:
        await stream.content.readany()
        process.process.send_signal(signal.SIGTERM)
        assert (await stream.read()).endswith(b"data: [DONE]\n\n")
    code, errors = await process.exit()
    assert code == 0
    assert "Traceback" not in errors


async def test_a_second_signal_ends_the_drain(process: Process) -> None:
    async with aiohttp.ClientSession(process.url) as client, client.post(CHAT, json=LONG) as stream:
        await stream.content.readany()
        process.process.send_signal(signal.SIGINT)
        process.process.send_signal(signal.SIGTERM)
        assert b"shutting down" in await stream.read()
    code, errors = await process.exit()
    assert code == 0
    assert "Traceback" not in errors


def test_a_taken_port_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = subprocess.run(command(port=port), capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert str(port) in line
    assert "--port" in line


def test_a_model_that_the_engine_cannot_serve_is_one_clear_line() -> None:
    ended = subprocess.run(command(model="nonesuch"), capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert "nonesuch" in line


async def test_what_the_cache_holds_is_published_and_withdrawn(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as store:
        async with serving(redis=redis_url, id="r1") as (server, client):
            body = HELLO | {"messages": [{"role": "user", "content": "publish this " * 40}]}
            async with client.post(CHAT, json=body) as response:
                assert response.status == 200
            async with client.get("/cache") as response:
                held = {bytes.fromhex(key) for key in (await response.json())["keys"]}
            assert held
            await eventually(lambda: store.smembers("warmroute:{default}:blocks:r1") == held)
            record = decode_record("r1", store.get("warmroute:{default}:replica:r1"), "")
            assert (record.url, record.model, record.state) == (server.url, "tiny", "accepting")
            assert record.capacity_blocks == 512
            assert store.exists(f"warmroute:{{default}}:tokenizer:{record.tokenizer}")
        assert store.smembers("warmroute:{default}:replicas") == set()


async def test_a_draining_replica_says_so_to_the_fleet(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as store:

        def state() -> str | None:
            value = store.get("warmroute:{default}:replica:r1")
            return decode_record("r1", value, "").state if value else None

        async with serving(redis=redis_url, id="r1") as (server, client):
            await eventually(lambda: state() == "accepting")
            async with client.post(CHAT, json=LONG) as stream:
                await stream.content.readany()
                stopping = asyncio.ensure_future(server.stop(grace_seconds=20))
                await eventually(lambda: state() == "draining")
            await stopping


async def test_without_redis_it_serves_all_the_same() -> None:
    async with serving(redis="redis://127.0.0.1:1") as (_, client), client.post(CHAT, json=HELLO) as response:
        assert response.status == 200


async def test_a_simulated_replica_never_imports_torch() -> None:
    code = "import sys, replica.server; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await child.wait() == 0
