"""The client leaves, at any stage: upstream is closed at once and every counter is back at zero."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.helpers import eventually
from tests.router.conftest import Bench, BenchFactory, chat
from tests.router.fake_replica import answer, open_stream


async def silent(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


async def head_only(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
    response = await open_stream(request)
    await asyncio.Event().wait()
    return response


async def endless(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
    response = await open_stream(request)
    while True:
        await response.write(b"data: x\n\n")
        await asyncio.sleep(0.005)


async def flood(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
    """Faster than a client that does not read."""
    response = await open_stream(request)
    while True:
        await response.write(b"x" * 65_536)


async def leave(b: Bench, body: dict[str, Any], *, after_bytes: bool) -> None:
    async def talk() -> None:
        async with b.client.post(b.url, json=body) as response:
            await response.content.readany()
            seen.set()
            await asyncio.Event().wait()

    seen = asyncio.Event()
    before = b.seen
    task = asyncio.create_task(talk())
    if after_bytes:
        await seen.wait()
    else:
        await eventually(lambda: b.seen > before, what="the request at the replica")
        assert b.router.placement.ledger.total_active == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("behave", "after_bytes"),
    [(silent, False), (head_only, False), (endless, True), (flood, True)],
    ids=["waiting for the head", "waiting for the first byte", "mid-stream", "not reading"],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_the_replica_and_owes_nothing(
    bench: BenchFactory, behave: Any, after_bytes: bool, stream: bool
) -> None:
    b = await bench(1)
    b.replicas[0].behave = behave
    await leave(b, chat(stream), after_bytes=after_bytes)
    await eventually(lambda: b.replicas[0].active == 0, what="the replica stopped")
    assert b.replicas[0].cancelled == 1 or behave is flood
    await b.settled()
    assert b.router.health.state(b.replicas[0].id, 0.0) == "closed", "a client's leaving says nothing about the replica"


async def test_a_client_that_leaves_while_sending_its_body_owes_nothing(bench: BenchFactory) -> None:
    b = await bench(1)
    host, port = b.router.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    await writer.drain()
    await eventually(lambda: b.router.admission.in_flight == 1, what="the request in flight")
    writer.transport.abort()
    await b.settled()
    assert b.seen == 0


async def test_a_flood_of_clients_that_leave_does_not_harm_the_next_one(bench: BenchFactory) -> None:
    b = await bench(2)
    for replica in b.replicas:
        replica.behave = silent
    timeout = aiohttp.ClientTimeout(total=0.3)

    async def visit() -> None:
        with pytest.raises(asyncio.TimeoutError):
            async with b.client.post(b.url, json=chat(), timeout=timeout) as response:
                await response.read()

    await asyncio.gather(*(visit() for _ in range(100)))
    await b.settled()
    for replica in b.replicas:
        replica.behave = answer
    async with b.client.post(b.url, json=chat()) as response:
        assert response.status == 200
        assert (await response.read()).endswith(b"[DONE]\n\n")
    await b.settled()


async def test_a_slow_client_holds_back_the_replica_instead_of_filling_memory(bench: BenchFactory) -> None:
    sent = 0

    async def gush(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        nonlocal sent
        response = await open_stream(request)
        while True:
            await response.write(b"x" * 65_536)
            sent += 65_536

    b = await bench(1)
    b.replicas[0].behave = gush
    async with b.client.post(b.url, json=chat()) as response:
        await response.content.readexactly(1)
        last = -1
        while sent != last:  # until it stands still
            last = sent
            await asyncio.sleep(0.2)
        assert sent < 32 * 2**20
    await b.settled()


async def test_a_client_that_never_reads_is_given_up(bench: BenchFactory) -> None:
    b = await bench(1, unread_timeout_seconds=0.3)
    b.replicas[0].behave = flood
    async with b.client.post(b.url, json=chat()) as response:
        await b.settled()
        with pytest.raises(aiohttp.ClientError):
            await response.read()


async def test_requests_over_the_limit_are_refused_with_retry_after_and_permits_come_back(bench: BenchFactory) -> None:
    b = await bench(1, max_in_flight=2, max_queue=0)
    b.replicas[0].behave = endless
    streams = [await b.client.post(b.url, json=chat()) for _ in range(2)]
    for stream in streams:
        await stream.content.readany()
    async with b.client.post(b.url, json=chat()) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        assert (await response.json())["error"]["code"] == "too_many_requests"
    for stream in streams:
        stream.close()
    await b.settled()
    b.replicas[0].behave = answer
    async with b.client.post(b.url, json=chat()) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("path", "last_event"),
    [
        ("/v1/chat/completions", b"data: [DONE]\n\n"),
        ("/v1/messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
    ],
)
async def test_a_client_that_leaves_at_the_last_event_has_been_answered(
    bench: BenchFactory, caplog: pytest.LogCaptureFixture, path: str, last_event: bytes
) -> None:
    async def done_but_open(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(b'data: {"chunk": 0}\n\n' + last_event)
        await asyncio.Event().wait()
        return response

    b = await bench(1)
    b.replicas[0].behave = done_but_open
    with caplog.at_level("INFO"):
        async with b.client.post(b.router.url + path, json=chat(max_tokens=8)) as response:
            await response.content.readuntil(last_event)
            response.close()
        await b.settled()

    (line,) = [record for record in caplog.records if record.message == "request"]
    assert line.__dict__["fields"]["outcome"] == "ok"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
