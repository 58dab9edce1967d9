"""A client's connection: HTTP/1.1 is kept to, both ways; what is broken, late or too much is told so and ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.client_connection import MOST_REFUSED, ClientConnection, ClientLimits
from router.client_request import ClientRequest, Response
from tests.broken_http import AMBIGUOUS_REQUESTS, answer_to
from tests.helpers import eventually
from tests.router.conftest import Bench, BenchFactory, chat
from tests.router.fake_replica import open_stream

PATH = b"/v1/chat/completions"
BODY = json.dumps(chat(False)).encode()


def request(body: bytes = BODY, *headers: bytes, line: bytes = b"POST " + PATH + b" HTTP/1.1") -> bytes:
    return b"\r\n".join([line, b"Host: x", *headers, b"Content-Length: %d" % len(body), b"", body])


class Answer:
    def __init__(self, head: bytes, body: bytes) -> None:
        first, *lines = head.decode().split("\r\n")
        self.status = int(first.split()[1])
        self.headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        self.body = body


class Visitor:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self, *, bodiless: bool = False) -> Answer:
        """The next one that has a length."""
        async with asyncio.timeout(10):
            head = await self.reader.readuntil(b"\r\n\r\n")
            while head.startswith(b"HTTP/1.1 100"):
                head = await self.reader.readuntil(b"\r\n\r\n")
            answer = Answer(head.removesuffix(b"\r\n\r\n"), b"")
            if not bodiless:
                answer.body = await self.reader.readexactly(int(answer.headers["content-length"]))
        return answer

    async def rest(self) -> bytes:
        """All that comes until the router hangs up."""
        return await asyncio.wait_for(self.reader.read(), 10)


@asynccontextmanager
async def visit(b: Bench) -> AsyncIterator[Visitor]:
    host, port = b.router.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Visitor(reader, writer)
    finally:
        writer.transport.abort()


@pytest.mark.parametrize(
    "sent",
    [
        *AMBIGUOUS_REQUESTS,
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /#fragment HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
        b"GET /\r\n\r\n",
    ],
)
async def test_what_could_be_read_in_two_ways_is_refused_and_ends_the_connection(
    bench: BenchFactory, sent: bytes
) -> None:
    b = await bench(1)
    # Whatever is smuggled in behind it is never looked at.
    status, headers, body = await answer_to(b.router.url, sent + request())
    assert (status, body["error"]["code"]) == (400, "invalid_http")
    assert headers["connection"] == "close"
    assert b.seen == 0


@pytest.mark.parametrize(
    "chunks",
    [b"0x5\r\nhello\r\n0\r\n\r\n", b"-1\r\n", b"5\r\nhello!\r\n", b"5\nhello\n0\n\n", b"\r\n", b"1;\x00\r\na\r\n"],
)
async def test_chunks_that_contradict_themselves_are_refused(bench: BenchFactory, chunks: bytes) -> None:
    b = await bench(1)
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % PATH
    async with visit(b) as visitor:
        visitor.writer.write(head + chunks + b"0\r\n\r\n" + b"x" * 20_000)
        answer = await visitor.answer()
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, "invalid_http")
        assert await visitor.rest() == b""
    await b.settled()
    assert b.seen == 0


async def test_a_chunked_body_reaches_the_replica_as_one(bench: BenchFactory) -> None:
    b = await bench(1)
    async with visit(b) as visitor:
        visitor.writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: Chunked\r\n\r\n" % PATH)
        for at in range(0, len(BODY), 7):
            piece = BODY[at : at + 7]
            visitor.writer.write(b"%X;ext=1\r\n%b\r\n" % (len(piece), piece))
        visitor.writer.write(b"0\r\nX-Trailer: 1\r\n\r\n" + request())
        assert [(await visitor.answer()).status for _ in range(2)] == [200, 200]
    assert [seen.body for seen in b.replicas[0].seen] == [BODY, BODY]


async def test_pipelined_requests_are_answered_one_by_one_in_their_order(bench: BenchFactory) -> None:
    b = await bench(1)
    release = asyncio.Event()

    async def behave(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        await release.wait()
        return web.Response(body=body)

    b.replicas[0].behave = behave
    sent = [json.dumps(chat(False, text=str(number))).encode() for number in range(5)]
    async with visit(b) as visitor:
        visitor.writer.write(b"".join(map(request, sent)))
        await eventually(lambda: b.seen == 1, what="the first at the replica")
        assert b.router.admission.in_flight == 1
        release.set()
        assert [(await visitor.answer()).body for _ in sent] == sent
    await b.settled()


async def test_a_client_that_ends_its_sending_side_still_gets_its_answer(bench: BenchFactory) -> None:
    b = await bench(1)
    asked = asyncio.Event()

    async def behave(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        asked.set()
        await asyncio.sleep(0.3)  # longer than it takes to see that somebody has left
        response = await open_stream(request)
        await response.write(b"data: 1\n\n")
        await asyncio.sleep(0.1)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    b.replicas[0].behave = behave
    async with visit(b) as visitor:
        visitor.writer.write(request())
        visitor.writer.write_eof()
        answer = await visitor.rest()
    assert asked.is_set()
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    await b.settled()


async def test_a_body_that_ends_before_its_length_is_told_so(bench: BenchFactory) -> None:
    b = await bench(1)
    async with visit(b) as visitor:
        visitor.writer.write(request()[:-5])
        visitor.writer.write_eof()
        answer = await visitor.answer()
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, "invalid_body")
        assert await visitor.rest() == b""
    await b.settled()


@pytest.mark.parametrize(("behind", "statuses"), [(request()[:-5], [200, 400]), (request()[:30], [200])])
async def test_what_is_cut_off_behind_a_request_is_not_waited_for(
    bench: BenchFactory, behind: bytes, statuses: list[int]
) -> None:
    b = await bench(1)
    async with visit(b) as visitor:
        visitor.writer.write(request() + behind)
        visitor.writer.write_eof()
        assert [(await visitor.answer()).status for _ in statuses] == statuses
        assert await asyncio.wait_for(visitor.rest(), 5) == b""
    await b.settled()
    assert b.seen == 1


async def test_a_head_that_is_too_long_or_has_too_many_headers_is_a_431_and_a_first_line_a_414(
    bench: BenchFactory,
) -> None:
    b = await bench(0, max_head_bytes=2048)
    for sent, expected in (
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 3000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: 1\r\n" * 200 + b"\r\n", 431),
        (b"GET /" + b"x" * 3000, 414),
        (b"GET /" + b"x" * 3000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    ):
        status, _, body = await answer_to(b.router.url, sent)
        assert (status, body["error"]["code"]) == (expected, "invalid_http")
        assert "send less" in body["error"]["message"]


async def test_a_head_that_comes_too_slowly_is_a_408_and_an_idle_connection_ends_without_a_word(
    bench: BenchFactory,
) -> None:
    b = await bench(0, head_timeout_seconds=0.5, idle_timeout_seconds=0.2)
    async with visit(b) as slow, visit(b) as silent, visit(b) as idle:
        idle.writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await idle.answer()).status == 200
        for byte in b"GET /hea":  # every byte in time, the whole not
            slow.writer.write(bytes([byte]))
            await asyncio.sleep(0.05)
        answer = await slow.answer()
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (408, "request_timeout")
        assert [await visitor.rest() for visitor in (slow, silent, idle)] == [b"", b"", b""]


async def test_a_connection_too_many_is_a_503(bench: BenchFactory) -> None:
    b = await bench(0, max_connections=1)
    async with visit(b) as first, visit(b) as second:
        first.writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await first.answer()).status == 200
        answer = await second.answer()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert json.loads(answer.body)["error"]["code"] == "too_many_connections"


async def test_far_too_many_connections_are_hung_up_on_and_places_come_back(bench: BenchFactory) -> None:
    b = await bench(0, max_connections=1)
    async with AsyncExitStack() as stack:
        visitors = [await stack.enter_async_context(visit(b)) for _ in range(1 + MOST_REFUSED + 3)]
        said = [await visitor.rest() for visitor in visitors[1:]]
        assert [b"too_many_connections" in answer for answer in said] == [True] * MOST_REFUSED + [False] * 3
        assert said[-3:] == [b""] * 3
    statuses: list[int] = []
    async with asyncio.timeout(10):
        while 200 not in statuses:
            async with visit(b) as visitor:
                visitor.writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                with suppress(asyncio.IncompleteReadError, ConnectionError):
                    statuses.append((await visitor.answer()).status)


async def test_a_client_that_takes_no_answer_is_dropped_though_all_is_written(bench: BenchFactory) -> None:
    async def large(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        return web.Response(body=b"x" * 30_000_000)

    b = await bench(1, unread_timeout_seconds=0.3)
    b.replicas[0].behave = large
    async with visit(b) as visitor:
        visitor.writer.write(request())
        await eventually(lambda: b.seen == 1, what="the request at the replica")
        await b.settled()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await visitor.answer()


async def test_whole_targets_old_clients_and_requests_without_a_body_are_understood(bench: BenchFactory) -> None:
    b = await bench(1)
    async with visit(b) as visitor:
        visitor.writer.write(b"GET http://x/health?a=1 HTTP/1.1\r\nHost: x\r\n\r\n\r\n")
        assert json.loads((await visitor.answer()).body) == {"status": "ok"}
        visitor.writer.write(b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await visitor.answer(bodiless=True)
        assert (head.status, head.headers["content-length"]) == (200, "15")
        visitor.writer.write(b"OPTIONS /v1/messages HTTP/1.1\r\nHost: x\r\n\r\n")
        options = await visitor.answer(bodiless=True)
        assert (options.status, options.headers["allow"]) == (204, "OPTIONS, POST")
        visitor.writer.write(b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await visitor.answer(bodiless=True)).status == 204
        visitor.writer.write(b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET /health HTTP/1.0\r\n\r\n")
        assert [(await visitor.answer()).status for _ in range(2)] == [200, 200]
        assert await visitor.rest() == b""


async def test_expectations_other_than_to_be_asked_for_the_body_are_refused(bench: BenchFactory) -> None:
    b = await bench(1)
    status, _, body = await answer_to(b.router.url, request(BODY, b"Expect: a-miracle"))
    assert (status, body["error"]["code"]) == (417, "expectation_failed")
    assert b.seen == 0


class _Transport(asyncio.Transport):
    """To nowhere."""

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


LIMITS = ClientLimits(10, 4096, 10**6, 10.0, 10.0, 10.0, 10.0)


@st.composite
def _conversations(draw: st.DrawFn) -> tuple[list[bytes], list[bytes]]:
    """Bodies, and the pieces in which their requests arrive."""
    bodies = draw(st.lists(st.binary(max_size=100), min_size=1, max_size=4))
    sent = b""
    for body in bodies:
        if draw(st.booleans()):
            sent += request(body)
        else:
            at = draw(st.integers(0, len(body)))
            parts = [part for part in (body[:at], body[at:]) if part]
            sent += b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            sent += b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    ends = sorted(draw(st.lists(st.integers(0, len(sent)), max_size=8)))
    return bodies, [sent[start:end] for start, end in zip([0, *ends], [*ends, len(sent)], strict=True)]


async def test_requests_are_the_same_wherever_the_network_cuts_them() -> None:
    examples: list[tuple[list[bytes], list[bytes]]] = []

    @settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(example=_conversations())
    def collect(example: tuple[list[bytes], list[bytes]]) -> None:
        examples.append(example)

    collect()
    for bodies, pieces in examples:
        seen: list[bytes] = []

        async def handle(request: ClientRequest) -> Response:
            seen.append(await request.read())  # noqa: B023
            return Response()

        connection = ClientConnection(asyncio.get_running_loop(), handle, LIMITS, set())
        connection.connection_made(_Transport())
        for number, piece in enumerate(pieces):
            connection.data_received(piece)
            if number % 2:
                await asyncio.sleep(0)
        await eventually(lambda: len(seen) == len(bodies))  # noqa: B023
        assert seen == bodies


async def test_to_a_client_that_has_hung_up_nothing_is_written() -> None:
    class Closed(_Transport):
        def is_closing(self) -> bool:
            return True

        def write(self, data: bytes | bytearray | memoryview) -> None:
            raise RuntimeError("the handler is closed")  # as uvloop's says

    async def handle(request: ClientRequest) -> Response:
        return Response()

    connection = ClientConnection(asyncio.get_running_loop(), handle, LIMITS, set())
    connection.connection_made(Closed())
    connection.write(b"data: 1\n\n")
