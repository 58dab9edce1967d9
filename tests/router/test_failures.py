"""What breaks upstream: retries before the first byte, clear ends after it, and who is asked again."""

from __future__ import annotations

import asyncio
import errno
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from tests.helpers import eventually
from tests.router.conftest import Bench, BenchFactory, chat
from tests.router.fake_replica import answer, die_in_the_middle, hang_up, open_stream, refuse

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def ask(b: Bench, stream: bool = True, path: str = "/v1/chat/completions") -> tuple[int, bytes, dict[str, str]]:
    async with b.client.post(b.router.url + path, json=chat(stream, max_tokens=5)) as response:
        return response.status, await response.read(), dict(response.headers)


def first_in_turn(b: Bench) -> tuple[str, str]:
    """Round robin starts with the smallest id."""
    first, second = sorted(replica.id for replica in b.replicas)
    return first, second


@pytest.mark.parametrize("behave", [hang_up, refuse(502), refuse(503)], ids=["reset", "502", "503"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_replica_that_breaks_before_the_first_byte_is_replaced_by_the_next(
    bench: BenchFactory, behave: Callable[..., Awaitable[web.StreamResponse]], stream: bool
) -> None:
    b = await bench(2)
    broken, well = first_in_turn(b)
    b.replica_for(broken).behave = behave
    status, _, headers = await ask(b, stream)
    assert (status, headers["x-warmroute-replica"]) == (200, well)
    assert (len(b.replica_for(broken).seen), len(b.replica_for(well).seen)) == (1, 1)
    await b.settled()


async def test_a_replica_that_cannot_be_reached_is_replaced_by_the_next(bench: BenchFactory) -> None:
    b = await bench(2)
    broken, well = first_in_turn(b)
    await b.replica_for(broken).stop()
    assert (await ask(b))[2]["x-warmroute-replica"] == well
    await b.settled()


async def test_a_retry_never_goes_to_the_broken_one_again(bench: BenchFactory) -> None:
    b = await bench(1, max_retries=5)
    b.replicas[0].behave = hang_up
    status, body, _ = await ask(b)
    assert (status, json.loads(body)["error"]["code"]) == (502, "replica_failed")
    assert b.seen == 1
    await b.settled()


async def test_retries_are_bounded(bench: BenchFactory) -> None:
    b = await bench(4, max_retries=2)
    for replica in b.replicas:
        replica.behave = hang_up
    status, body, headers = await ask(b, path="/v1/messages")
    assert (status, json.loads(body)["type"]) == (502, "error")
    assert b.seen == 3
    assert headers["x-warmroute-replica"]
    await b.settled()


async def test_replicas_that_cannot_be_reached_are_no_retries(bench: BenchFactory) -> None:
    b = await bench(4, max_retries=0)
    *gone, well = sorted(b.replicas, key=lambda replica: replica.id)
    for replica in gone:
        await replica.stop()
    status, _, headers = await ask(b)
    assert (status, headers["x-warmroute-replica"]) == (200, well.id)
    await well.stop()
    status, body, _ = await ask(b)
    assert (status, json.loads(body)["error"]["code"]) == (502, "replica_failed")
    await b.settled()


async def test_a_router_without_descriptors_says_so_and_blames_no_replica(
    bench: BenchFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = await bench(2)

    async def exhausted(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async with b.client.post(b.url, json=chat()) as kept:  # so that the client needs no new connection below
        await kept.read()
    monkeypatch.setattr(b.router._upstream, "_pooled", lambda origin: None)
    monkeypatch.setattr(b.router._upstream._loop, "create_connection", exhausted)
    for _ in range(4):
        status, body, headers = await ask(b)
        assert (status, json.loads(body)["error"]["code"], headers["Retry-After"]) == (503, "router_exhausted", "1")
    monkeypatch.undo()
    assert (await ask(b))[0] == 200
    assert not b.router.health._breakers


async def test_the_last_replicas_503_passes_as_it_is(bench: BenchFactory) -> None:
    b = await bench(2)
    for replica in b.replicas:
        replica.behave = refuse(503, **{"Retry-After": "3"})
    status, body, headers = await ask(b)
    assert (status, body, headers["Retry-After"]) == (503, b'{"refused": 503}', "3")
    assert b.seen == 2


async def test_a_head_without_a_body_is_not_yet_an_answer(bench: BenchFactory) -> None:
    async def head_then_death(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        response = await open_stream(request)
        assert request.transport is not None
        request.transport.abort()
        return response

    b = await bench(2)
    broken, well = first_in_turn(b)
    b.replica_for(broken).behave = head_then_death
    assert (await ask(b))[2]["x-warmroute-replica"] == well


async def test_a_death_after_the_first_byte_ends_the_stream_with_the_apis_error_and_is_not_retried(
    bench: BenchFactory,
) -> None:
    b = await bench(2)
    for replica in b.replicas:
        replica.behave = die_in_the_middle
    status, body, _ = await ask(b)
    assert status == 200
    events = [event for event in body.split(b"\n\n") if event]
    assert events[0] == b'data: {"chunk": 0}'
    assert json.loads(events[1].removeprefix(b"data: "))["error"]["code"] == "replica_failed"
    assert events[2] == b"data: [DONE]"
    assert b.seen == 1
    _, body, _ = await ask(b, path="/v1/messages")
    assert b"event: error\ndata: " in body
    assert b"[DONE]" not in body
    assert b.seen == 2
    await b.settled()


async def test_a_truncated_document_does_not_look_complete(bench: BenchFactory) -> None:
    async def half(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"half":')
        assert request.transport is not None
        request.transport.close()
        return response

    b = await bench(1)
    b.replicas[0].behave = half
    with pytest.raises(aiohttp.ClientError):
        await ask(b, stream=False)
    await b.settled()


async def test_silence_before_the_first_byte_is_a_504_and_between_chunks_an_error_event(bench: BenchFactory) -> None:
    async def silent(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        await asyncio.Event().wait()
        return web.Response()

    async def stuck(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(b"data: 1\n\n")
        await asyncio.Event().wait()
        return response

    b = await bench(1, first_byte_timeout_seconds=0.2, chunk_timeout_seconds=0.1)
    b.replicas[0].behave = silent
    status, body, _ = await ask(b)
    assert (status, json.loads(body)["error"]["code"]) == (504, "replica_timeout")
    b.replicas[0].behave = stuck
    status, body, _ = await ask(b)
    assert status == 200
    assert b"replica_failed" in body
    await b.settled()
    await eventually(lambda: b.replicas[0].cancelled == 2, what="both upstream requests hung up")


async def test_an_answer_that_never_ends_is_ended_and_so_is_one_that_stops_after_its_replica_left(
    bench: BenchFactory,
) -> None:
    async def endless(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        response = await open_stream(request)
        while True:
            await response.write(b"data: 1\n\n")
            await asyncio.sleep(0.02)

    b = await bench(1, request_timeout_seconds=0.3)
    b.replicas[0].behave = endless
    for _ in range(4):
        status, body, _ = await ask(b)
        assert (status, b"longer than requests may" in body) == (200, True)
    assert b.router.health.state(b.replicas[0].id, 0.0) == "closed", "it did what it was asked"
    await b.settled()

    async def stuck(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(b"data: 1\n\n")
        await asyncio.Event().wait()
        return response

    b = await bench(1, chunk_timeout_seconds=0.3)
    b.replicas[0].behave = stuck
    async with b.client.post(b.url, json=chat()) as response:
        await response.content.readuntil(b"\n\n")
        b.router._upstream.retain([])
        assert b"replica_failed" in await response.read()
    await b.settled()


async def test_a_breaker_opens_keeps_the_broken_out_and_lets_one_trial_bring_it_back(bench: BenchFactory) -> None:
    b = await bench(2)
    broken, well = first_in_turn(b)
    b.replica_for(broken).behave = hang_up
    for _ in range(12):
        assert (await ask(b))[0] == 200
    assert len(b.replica_for(broken).seen) == 3
    b.replica_for(broken).behave = answer
    await eventually(lambda: b.router.health.usable(broken, time.monotonic()), what="a trial is due")
    assert {(await ask(b))[2]["x-warmroute-replica"] for _ in range(2)} == {broken, well}
    assert b.router.health.state(broken, 0.0) == "closed"


async def test_a_replica_that_always_dies_in_the_middle_is_kept_out_too(bench: BenchFactory) -> None:
    b = await bench(2)
    broken, _ = first_in_turn(b)
    b.replica_for(broken).behave = die_in_the_middle
    for _ in range(10):
        await ask(b)
    assert len(b.replica_for(broken).seen) == 3
    await b.settled()


async def test_when_every_breaker_is_open_they_are_all_tried(bench: BenchFactory) -> None:
    b = await bench(1)
    b.replicas[0].behave = hang_up
    for _ in range(4):
        assert (await ask(b))[0] == 502
    b.replicas[0].behave = answer
    assert (await ask(b))[0] == 200


async def test_a_drained_replica_gets_nothing_new_and_finishes_what_it_has(bench: BenchFactory) -> None:
    b = await bench(2)
    release = asyncio.Event()

    async def slow(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(b"data: 1\n\n")
        await release.wait()
        await response.write_eof()
        return response

    drained, other = first_in_turn(b)
    b.replica_for(drained).behave = slow
    running = asyncio.create_task(ask(b))
    await eventually(lambda: b.replica_for(drained).seen)
    async with b.client.post(f"{b.router.url}/replicas/{drained}/drain") as response:
        assert response.status == 200
    assert {(await ask(b))[2]["x-warmroute-replica"] for _ in range(4)} == {other}
    release.set()
    assert (await running)[1] == b"data: 1\n\n"
    async with b.client.post(f"{b.router.url}/replicas/{other}/drain") as response:
        assert response.status == 200
    status, body, headers = await ask(b)
    assert (status, json.loads(body)["error"]["code"], headers["Retry-After"]) == (503, "not_ready", "2")
    assert "is draining" in json.loads(body)["error"]["message"]
    async with b.client.post(f"{b.router.url}/replicas/{drained}/undrain") as response:
        assert response.status == 200
    assert (await ask(b))[0] == 200
    async with b.client.post(f"{b.router.url}/replicas/nobody/drain") as response:
        assert response.status == 404


async def test_without_any_replica_the_answer_says_what_to_do(bench: BenchFactory) -> None:
    b = await bench(0)
    status, body, headers = await ask(b)
    assert (status, headers["Retry-After"]) == (503, "2")
    assert "start one" in json.loads(body)["error"]["message"]
    status, body, _ = await ask(b, path="/v1/messages")
    assert json.loads(body)["error"]["type"] == "overloaded_error"


@asynccontextmanager
async def raw_server(serve: Serve) -> AsyncIterator[str]:
    writers = []

    async def tracked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await serve(reader, writer)

    server = await asyncio.start_server(tracked, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
    )
    return head + await reader.readexactly(length)


@pytest.mark.parametrize(
    "garbage",
    [b"\x00\x01garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Le", b"HTTP/1.1 200 OK\r\nX: a\x00b\r\n\r\n", b""],
    ids=["bytes", "half a head", "a null in a header", "nothing"],
)
async def test_a_replica_that_answers_garbage_costs_a_502_and_nothing_else(bench: BenchFactory, garbage: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_request(reader)
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n" if request[:3] == b"GET" else garbage)
        await writer.drain()
        writer.close()

    b = await bench(0)
    async with raw_server(serve) as url:
        b.router.fleet.add_static(url)
        status, body, _ = await ask(b)
        assert (status, json.loads(body)["error"]["code"]) == (502, "replica_failed")
        await b.settled()


async def test_a_stale_pooled_connection_is_sent_again_once_to_the_same_replica(bench: BenchFactory) -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One good answer a connection; the second request on it is met by a reset."""
        nonlocal connections
        connections += 1
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        await reader.read(1)
        writer.transport.abort()

    b = await bench(0)
    async with raw_server(serve) as url:
        b.router.fleet.add_static(url)
        for _ in range(3):
            assert (await ask(b, stream=False))[:2] == (200, b"{}")
        assert connections == 3
        await b.settled()


async def test_a_fresh_connection_that_breaks_is_not_sent_again_to_the_same_replica(bench: BenchFactory) -> None:
    b = await bench(1)
    b.replicas[0].behave = hang_up
    assert (await ask(b))[0] == 502
    assert b.seen == 1
