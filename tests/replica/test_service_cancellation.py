"""Whoever leaves, at whatever moment, costs the engine nothing more."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import aiohttp
import pytest

from replica.server import ReplicaServer
from tests.helpers import eventually
from tests.replica.sim_server import CHAT, HELLO, serving

LONG: dict[str, Any] = HELLO | {"max_tokens": 4000, "ignore_eos": True}


def is_idle(server: ReplicaServer) -> bool:
    assert server.service is not None
    load = server.service.engine.load()
    return load.running == load.waiting == load.queued_prefill_tokens == 0


def in_hand(server: ReplicaServer) -> int:
    assert server.service is not None
    load = server.service.engine.load()
    return load.running + load.waiting


async def answer(client: aiohttp.ClientSession, body: dict[str, Any]) -> Any:
    async with client.post(CHAT, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_stops_when_the_client_leaves(stream: bool) -> None:
    async with serving() as (server, client):
        request = asyncio.ensure_future(client.post(CHAT, json=LONG | {"stream": stream}))
        await eventually(lambda: not is_idle(server))
        if stream:
            response = await request
            await response.content.readany()
            response.close()
        else:
            request.cancel()
        await eventually(lambda: is_idle(server), timeout_seconds=2)


async def test_a_flood_that_disconnects_leaves_no_trace() -> None:
    async with serving(max_running=16, max_waiting=400) as (server, client):
        before = await answer(client, HELLO)
        host, _, port = server.url.removeprefix("http://").partition(":")

        async def ask(number: int) -> asyncio.StreamWriter:
            prompt = {"messages": [{"role": "user", "content": f"{number} " * 100}], "stream": number % 2 == 0}
            body = json.dumps(LONG | prompt)
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            return writer

        writers = await asyncio.gather(*(ask(number) for number in range(200)))
        await eventually(lambda: in_hand(server) == 200)
        for writer in writers:
            writer.close()
        after = await asyncio.wait_for(answer(client, HELLO), 5)
        assert after["choices"] == before["choices"]
        await eventually(lambda: is_idle(server))
        async with client.get("/metrics") as response:
            metrics = await response.text()
        outcomes = dict(re.findall(r'warmroute_requests_total.*outcome="(\w+)"} ([\d.]+)', metrics))
        assert outcomes == {"ok": "2.0", "aborted": "200.0"}


async def test_a_client_that_leaves_before_its_body_is_complete_is_forgotten() -> None:
    async with serving() as (server, client):
        address = server.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(address[0], int(address[1]))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        await writer.drain()
        writer.close()
        await answer(client, HELLO)
        assert is_idle(server)


async def test_a_stop_string_ends_the_computing_too() -> None:
    async with serving() as (server, client):
        text = (await answer(client, HELLO | {"max_tokens": 30}))["choices"][0]["message"]["content"]
        cut = await answer(client, LONG | {"stop": text[10:20]})
        assert cut["choices"][0]["finish_reason"] == "stop"
        await eventually(lambda: is_idle(server), timeout_seconds=2)


async def test_a_full_engine_says_when_to_come_back() -> None:
    async with serving(max_running=1, max_waiting=0) as (server, client):
        busy = asyncio.ensure_future(client.post(CHAT, json=LONG))
        await eventually(lambda: not is_idle(server))
        async with client.post(CHAT, json=HELLO) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "engine_full"
        busy.cancel()
        await eventually(lambda: is_idle(server))
        await answer(client, HELLO)


async def test_a_slow_reader_gets_everything_and_holds_up_nobody() -> None:
    async with serving(sim_base_seconds=0) as (server, client):
        async with client.post(CHAT, json=LONG | {"stream": True}) as slow:
            assert server.service is not None
            service = server.service
            await answer(client, HELLO)
            await eventually(lambda: is_idle(server), timeout_seconds=30)
            frames = [line for line in (await slow.read()).decode().split("\n\n") if line]
        text = "".join(json.loads(frame[6:])["choices"][0]["delta"].get("content", "") for frame in frames[:-1])
        whole = await answer(client, LONG)
        assert text == whole["choices"][0]["message"]["content"]
        assert service.engine.alive
