"""The replica's HTTP is read as strictly as the router's, so that both always see the same requests."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.broken_http import AMBIGUOUS_REQUESTS, answer_to
from tests.replica.sim_server import CHAT, HELLO, serving

BODY = json.dumps(HELLO).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
REQUEST = HEAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(BODY) + BODY


@pytest.fixture
async def served() -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    async with serving() as (server, client):
        yield server.url, client


async def answered(client: aiohttp.ClientSession) -> int:
    """How many requests have come as far as a handler."""
    async with client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("warmroute_requests_total{"))


async def test_what_could_be_read_in_two_ways_is_refused_and_ends_the_connection(
    served: tuple[str, aiohttp.ClientSession],
) -> None:
    url, client = served
    for sent in AMBIGUOUS_REQUESTS:
        status, _, body = await answer_to(url, sent + REQUEST)  # what is smuggled in behind it is never looked at
        assert (status, body["error"]["code"]) == (400, "invalid_http"), sent
    assert await answered(client) == 0


@pytest.mark.parametrize("sent", [b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n", b"GET /health\r\n\r\n"])
async def test_other_versions_of_http_are_not_served(served: tuple[str, aiohttp.ClientSession], sent: bytes) -> None:
    status, _, body = await answer_to(served[0], sent)
    assert (status, body["error"]["code"]) == (505, "invalid_http")


@pytest.mark.parametrize(
    "chunks",
    [
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"-1\r\n",
        b"1_0\r\n0123456789abcdef\r\n0\r\n\r\n",
        b"5\r\nhello!\r\n0\r\n\r\n",
        b"5\nhello\n0\n\n",
        b"\r\n",
        b"1;\x00\r\na\r\n0\r\n\r\n",
        b"1;a\nb\r\na\r\n0\r\n\r\n",
        b"ffffffffffffffff0\r\nhello",
    ],
)
async def test_chunks_that_contradict_themselves_are_refused(
    served: tuple[str, aiohttp.ClientSession], chunks: bytes
) -> None:
    status, _, body = await answer_to(served[0], HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + REQUEST)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    "framed",
    [
        b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
        b"transfer-encoding: Chunked\r\n\r\n%x;a=b\r\n%b\r\n0;c\r\nX-Trailer: 1\r\n\r\n" % (len(BODY), BODY),
        b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
    ],
)
async def test_a_body_is_the_same_however_it_is_framed(
    served: tuple[str, aiohttp.ClientSession], framed: bytes
) -> None:
    address = urlsplit(served[0])
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(HEAD + framed + REQUEST)
    said = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert said.count(b"HTTP/1.1 200 OK") == 2
    assert said.count(b'"finish_reason"') == 2


@pytest.mark.parametrize(
    "packed", [gzip.compress(BODY), gzip.compress(BODY[:30]) + gzip.compress(BODY[30:])], ids=["one", "two members"]
)
async def test_packed_bodies_are_read_whole(served: tuple[str, aiohttp.ClientSession], packed: bytes) -> None:
    async with served[1].post(CHAT, data=packed, headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 200, await response.text()


async def test_heads_that_a_router_takes_are_taken_and_longer_ones_are_told_so(
    served: tuple[str, aiohttp.ClientSession],
) -> None:
    url, client = served
    async with client.post(CHAT, json=HELLO, headers={"Authorization": "Bearer " + "x" * 16_000}) as response:
        assert response.status == 200
    many = {f"X-{number}": "1" for number in range(140)}  # a client's 128, and what routers add
    async with client.post(CHAT + "?" + "x" * 16_000, json=HELLO, headers=many) as response:
        assert response.status == 200
    for sent in (
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 100_000 + b"\r\n\r\n",
    ):
        status, _, body = await answer_to(url, sent)
        assert (status, body["error"]["code"]) == (431, "invalid_http")
        assert "send less" in body["error"]["message"]
