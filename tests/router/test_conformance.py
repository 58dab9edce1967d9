"""What passes through the router passes unchanged, and what a replica answers in two ways is no answer.

What clients may send is in `test_client_connection`; here is the same table the other way round.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yarl import URL

from tests.router.conftest import BenchFactory, chat
from tests.router.fake_replica import refuse

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@asynccontextmanager
async def replica_that_answers(answer: bytes) -> AsyncIterator[str]:
    """To every request, whatever it is; then it hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        try:
            await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
        OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        OK + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
        OK + b"Content-Length: +2\r\n\r\n{}",
        OK + b"Content-Length: 0x2\r\n\r\n{}",
        OK + b"Content-Length: 2, 2\r\n\r\n{}",
        OK + b"Content-Length: 2 2\r\n\r\n{}",
        OK + b"Content-Length: 99999999999999999999\r\n\r\n{}",
        OK + b"Transfer-Encoding: xchunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked, gzip\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}",
        OK + b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
        OK + b" folded: 1\r\nContent-Length: 2\r\n\r\n{}",
        OK + b"Content-Length : 2\r\n\r\n{}",
        OK + b"A: 1\nB: 2\r\nContent-Length: 2\r\n\r\n{}",
        OK + b"A: \x00\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 2000 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/2.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"{}",
        b"HTTP/1.1 200 OK\r\n",
        OK + b"X-Endless: " + b"x" * 200_000,
    ],
)
async def test_an_answer_that_could_be_read_in_two_ways_or_not_at_all_is_a_502(
    bench: BenchFactory, answer: bytes
) -> None:
    b = await bench(0)
    async with replica_that_answers(answer) as url:
        b.router.fleet.add_static(url)
        async with b.client.post(b.url, json=chat(False)) as response:
            assert response.status == 502
            assert (await response.json())["error"]["code"] == "replica_failed"
    await b.settled()


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 2\r\n\r\n{}",
        OK + b"transfer-encoding: Chunked\r\n\r\n1;ext=1\r\n{\r\n1\r\n}\r\n0\r\nX-Trailer: 1\r\n\r\n",
        OK + b"\r\n{}",
        b"HTTP/1.0 200 OK\r\n\r\n{}",
        b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
async def test_an_answer_in_any_form_that_has_one_meaning_passes(bench: BenchFactory, answer: bytes) -> None:
    b = await bench(0)
    async with replica_that_answers(answer) as url:
        b.router.fleet.add_static(url)
        async with b.client.post(b.url, json=chat(False)) as response:
            assert (response.status, await response.read()) == (200, b"{}")
            assert "X-Trailer" not in response.headers
            assert len(response.headers.getall("Content-Length", [])) <= 1
    await b.settled()


async def test_bodies_reach_the_replica_byte_by_byte_however_they_are_spaced_spelt_or_large(
    bench: BenchFactory,
) -> None:
    b = await bench(1)
    b.replicas[0].behave = refuse(200)
    spaces = st.text(" \t\r\n", max_size=3)
    values = st.text(max_size=20) | st.integers() | st.just(10**40) | st.floats(allow_nan=False, allow_infinity=False)
    bodies: list[bytes] = []

    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(before=spaces, after=spaces, value=values, ascii_only=st.booleans())
    def collect(before: str, after: str, value: object, ascii_only: bool) -> None:
        whole = json.dumps(chat(False, extra=value), ensure_ascii=ascii_only)
        bodies.append((before + whole + after).encode(errors="surrogatepass"))

    collect()
    for body in bodies:
        async with b.client.post(b.url, data=body) as response:
            assert response.status == 200, (body, await response.read())
    assert [seen.body for seen in b.replicas[0].seen] == bodies


async def test_packed_bodies_of_several_members_are_read_whole_and_pass_as_they_are(bench: BenchFactory) -> None:
    b = await bench(1)
    b.replicas[0].behave = refuse(200)
    whole = json.dumps(chat(False)).encode()
    packed = gzip.compress(whole[:30]) + gzip.compress(whole[30:])
    async with b.client.post(b.url, data=packed, headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 200, await response.read()
    assert b.replicas[0].seen[0].body == packed


async def test_packed_bodies_that_end_early_or_go_on_behind_their_end_are_refused(bench: BenchFactory) -> None:
    b = await bench(1)
    packed = gzip.compress(json.dumps(chat(False)).encode())
    for wrong in (packed[:-4], packed + b"more", packed + packed[:8], gzip.compress(b"") * 100):
        async with b.client.post(b.url, data=wrong, headers={"Content-Encoding": "gzip"}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (400, "invalid_body")
    twice = zlib.compress(json.dumps(chat(False)).encode()) + b"more"
    async with b.client.post(b.url, data=twice, headers={"Content-Encoding": "deflate"}) as response:
        assert response.status == 400
    assert b.seen == 0


async def test_the_trace_context_passes_unchanged_and_every_header_once(bench: BenchFactory) -> None:
    b = await bench(1)
    sent = {
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "tracestate": "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7",
        "Accept": "text/event-stream",
        "X-Own": "1",
    }
    async with b.client.post(b.url, json=chat(False), headers=sent) as response:
        assert response.status == 200
    passed = b.replicas[0].seen[0].headers
    for name, value in sent.items():
        assert passed.getall(name) == [value]


@pytest.mark.parametrize("model", ["x\r\nSet-Cookie: a=1", "x\x00", "é\u2028", "http://169.254.169.254/"])
async def test_no_name_that_a_client_makes_up_becomes_a_header_or_an_address(bench: BenchFactory, model: str) -> None:
    b = await bench(1)
    async with b.client.post(b.url, json=chat(False, model=model)) as response:
        assert response.status == 404
        assert "Set-Cookie" not in response.headers
    target = f"{b.router.url}/v1/models/x%0d%0aSet-Cookie:%20a=1"
    async with b.client.get(URL(target, encoded=True)) as response:
        assert response.status == 404
        assert "Set-Cookie" not in response.headers
    assert b.seen == 0
