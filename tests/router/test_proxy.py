"""Requests go in and answers come out as they came; headers, errors and pass-through."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from tests.helpers import eventually
from tests.router.conftest import BenchFactory, chat
from tests.router.fake_replica import open_stream, refuse


async def test_a_stream_passes_byte_for_byte_with_the_headers_of_the_decision(bench: BenchFactory) -> None:
    b = await bench(1)
    async with b.client.post(b.url, json=chat()) as response:
        body = await response.read()
    assert response.status == 200
    assert body == b'data: {"chunk": 0}\n\ndata: {"chunk": 1}\n\ndata: {"chunk": 2}\n\ndata: [DONE]\n\n'
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-warmroute-replica"] == b.replicas[0].id
    assert response.headers["x-warmroute-policy"] == "round-robin"
    assert response.headers["x-warmroute-reason"] == "turn"
    assert response.headers["x-warmroute-predicted-tokens"] == "0"
    assert response.headers["x-warmroute-cached-tokens"] == "7"
    assert response.headers["x-warmroute-view"] == "approximate"
    assert response.headers["x-request-id"]
    await b.settled()


async def test_the_body_reaches_the_replica_byte_identical(bench: BenchFactory) -> None:
    b = await bench(1)
    odd = b'{ "messages" :[{"role":"user","content":"caf\\u00e9 \xf0\x9f\x99\x82"}],\n "model":"fake","unknown": 1e-3 }'
    async with b.client.post(b.url, data=odd, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 200
    assert b.replicas[0].seen[0].body == odd


async def test_a_large_body_passes_and_one_over_the_limit_is_refused(bench: BenchFactory) -> None:
    b = await bench(1, max_body_bytes=20_000_000)
    large = json.dumps(chat(text="x" * 15_000_000, stream=False)).encode()
    async with b.client.post(b.url, data=io.BytesIO(large)) as response:
        assert response.status == 200
    assert b.replicas[0].seen[0].body == large
    async with b.client.post(b.url, data=io.BytesIO(large + b" " * 6_000_000)) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "request_too_large"
    assert b.seen == 1
    await b.settled()


async def test_a_chunked_body_over_the_limit_is_refused_too(bench: BenchFactory) -> None:
    b = await bench(1, max_body_bytes=10_000)

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    async with b.client.post(b.url, data=endless()) as response:
        assert response.status == 413
    assert b.seen == 0


async def test_a_body_that_does_not_go_on_is_given_up(bench: BenchFactory) -> None:
    b = await bench(1, body_timeout_seconds=0.3)
    whole = json.dumps(chat(False)).encode()

    async def in_pieces(pause_seconds: float) -> AsyncIterator[bytes]:
        for start in range(0, len(whole), 30):
            yield whole[start : start + 30]
            await asyncio.sleep(pause_seconds)

    async with b.client.post(b.url, data=in_pieces(0.15)) as response:
        assert response.status == 200, "slow, but it goes on"
    async with b.client.post(b.url, data=in_pieces(5)) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (408, "request_timeout")
    await b.settled()
    assert b.seen == 1


async def test_the_first_byte_passes_before_the_last_is_produced(bench: BenchFactory) -> None:
    b = await bench(1)
    seen_by_client = asyncio.Event()

    async def behave(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(b"data: 1\n\n")
        await seen_by_client.wait()
        await response.write(b"data: 2\n\n")
        await response.write_eof()
        return response

    b.replicas[0].behave = behave
    async with b.client.post(b.url, json=chat()) as response:
        assert await response.content.readany() == b"data: 1\n\n"
        seen_by_client.set()
        assert await response.content.read() == b"data: 2\n\n"


async def test_a_compressed_request_is_routed_and_passes_as_it_is(bench: BenchFactory) -> None:
    b = await bench(1)
    b.replicas[0].behave = refuse(200)
    packed = gzip.compress(json.dumps(chat()).encode())
    async with b.client.post(b.url, data=packed, headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 200
    assert b.replicas[0].seen[0].body == packed
    assert b.replicas[0].seen[0].headers["Content-Encoding"] == "gzip"


async def test_a_compressed_request_that_unpacks_to_too_much_is_refused(bench: BenchFactory) -> None:
    b = await bench(1, max_body_bytes=100_000)
    packed = gzip.compress(json.dumps(chat(text="x" * 1_000_000)).encode())
    async with b.client.post(b.url, data=packed, headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 413
    async with b.client.post(b.url, data=b"not gzip", headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 400
    async with b.client.post(b.url, data=b"{}", headers={"Content-Encoding": "zstd"}) as response:
        assert response.status == 415


async def test_a_compressed_answer_passes_as_it_is(bench: BenchFactory) -> None:
    b = await bench(1)
    packed = gzip.compress(b'{"ok": true}')

    async def behave(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"}, content_type="application/json")

    b.replicas[0].behave = behave
    async with b.client.post(b.url, json=chat()) as response:
        assert await response.read() == packed
        assert response.headers["Content-Encoding"] == "gzip"
        assert response.headers.getall("Content-Length") == [str(len(packed))]


async def test_a_body_announced_with_expect_is_asked_for(bench: BenchFactory) -> None:
    b = await bench(1)
    async with b.client.post(b.url, json=chat(), expect100=True) as response:
        assert response.status == 200
    assert "Expect" not in b.replicas[0].seen[0].headers


async def test_only_what_is_the_routers_own_or_hop_by_hop_is_kept_from_the_replica(bench: BenchFactory) -> None:
    b = await bench(1, admin_key="s3cret-admin")
    headers = {
        "Authorization": "Bearer user-key",
        "X-Admin": "Bearer s3cret-admin",
        "X-Warmroute-Tenant": "someone-else",
        "Baggage": "a=1",
        "Connection": "keep-alive, X-Private",
        "X-Private": "1",
        "TE": "trailers",
        "X-Request-Id": "abc-1",
    }
    async with b.client.post(b.url, json=chat(), headers=headers) as response:
        assert response.headers.getall("x-request-id") == ["abc-1"]
    passed = b.replicas[0].seen[0].headers
    assert (passed["Authorization"], passed["Baggage"], passed["X-Request-Id"]) == (
        "Bearer user-key",
        "a=1",
        "abc-1",
    )
    assert not {"X-Admin", "X-Warmroute-Tenant", "X-Private", "TE"} & set(passed)
    assert passed["Host"] == b.replicas[0].id


async def test_a_request_id_that_is_not_sane_is_replaced(bench: BenchFactory) -> None:
    b = await bench(1)
    ids = set()
    for bad in ("", "a b", "x" * 500, "é"):
        async with b.client.post(b.url, json=chat(), headers={"X-Request-Id": bad}) as response:
            ids.add(response.headers["x-request-id"])
    assert len(ids) == 4
    assert not ids & {"", "a b", "x" * 500, "é"}


async def test_a_clients_error_passes_untouched_and_is_not_retried(bench: BenchFactory) -> None:
    b = await bench(2)
    for status in (400, 404, 422, 429):
        for replica in b.replicas:
            replica.behave = refuse(status, **{"Retry-After": "9", "X-Own": "1"})
        async with b.client.post(b.url, json=chat()) as response:
            assert response.status == status
            assert await response.text() == f'{{"refused": {status}}}'
            assert (response.headers["Retry-After"], response.headers["X-Own"]) == ("9", "1")
    assert b.seen == 4
    assert all(b.router.health.state(replica.id, 0.0) == "closed" for replica in b.replicas)
    await b.settled()


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b"\xff\xfe", 400, "invalid_json"),
        (b'{"model": "fake"}', 400, "missing_required_parameter"),
        (
            b'{"model": "other", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}',
            404,
            "model_not_found",
        ),
    ],
)
async def test_bad_input_is_answered_in_the_apis_own_words(
    bench: BenchFactory, body: bytes, status: int, code: str
) -> None:
    b = await bench(1)
    async with b.client.post(b.url, data=body) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (status, code)
        assert response.headers["x-request-id"]
    async with b.client.post(b.url.replace("chat/completions", "messages"), data=body) as response:
        document = await response.json()
        assert (response.status, document["type"], document["error"]["code"]) == (status, "error", code)
    async with b.client.post(b.url, json=chat()) as response:
        assert response.status == 200
    assert b.seen == 1


async def test_paths_and_methods_that_are_not_there_are_api_errors(bench: BenchFactory) -> None:
    b = await bench(1)
    async with b.client.get(b.url) as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert (await response.json())["error"]["code"] == "method_not_allowed"
    async with b.client.post(b.router.url + "/replicas") as response:
        assert (response.status, response.headers["Allow"]) == (405, "GET")
    for path in ("/nothing", "/v1/../reset_prefix_cache", "/v1/%2e%2e/reset_prefix_cache", "/v1"):
        async with b.client.post(URL(b.router.url + path, encoded=True)) as response:
            assert response.status == 404, path
            assert (await response.json())["error"]["code"] == "path_not_found"
    assert b.seen == 0


async def test_unknown_paths_of_the_api_go_to_the_replica_with_the_fewest_requests(bench: BenchFactory) -> None:
    b = await bench(2)
    release = asyncio.Event()

    async def behave(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        await release.wait()
        return web.json_response({"path": request.path})

    for replica in b.replicas:
        replica.behave = behave
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(_post(b.client, b.router.url + "/v1/embeddings?x=1", {"model": "fake", "input": "x"}))
        await eventually(lambda: b.seen == 2)
        assert [len(replica.seen) for replica in b.replicas] == [1, 1]
        assert b.router.placement.ledger.total_active == 2
        assert b.replicas[0].seen[0].path == "/v1/embeddings?x=1"
        release.set()
    await b.settled()


async def test_a_replica_cannot_inject_headers_or_speak_for_the_router(bench: BenchFactory) -> None:
    b = await bench(1)
    b.replicas[0].behave = refuse(200, **{"X-Warmroute-Replica": "evil", "X-Request-Id": "theirs", "Server": "vllm"})
    async with b.client.post(b.url, json=chat()) as response:
        assert response.headers.getall("x-warmroute-replica") == [b.replicas[0].id]
        assert response.headers.getall("x-request-id") != ["theirs"]
        assert response.headers.getall("Server") == ["vllm"]


async def _post(client: aiohttp.ClientSession, url: str, body: object) -> int:
    async with client.post(url, json=body) as response:
        await response.read()
        return response.status
