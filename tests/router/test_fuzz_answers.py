"""Replicas' answers with bytes changed, left out, put in and cut off: a whole answer, an error or a cut, in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.router.conftest import BenchFactory, chat

WHOLE = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Own: a b\r\nContent-Length: 8\r\n\r\n{"a": 1}'
STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'14\r\ndata: {"chunk": 0}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\nX-T: 1\r\n\r\n'
)
UNTIL_CLOSED = b'HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n{"a": 1}'
REFUSED = b'HTTP/1.1 400 Bad Request\r\nContent-Length: 13\r\n\r\n{"error": {}}'
ANSWERS = (WHOLE, STREAM, UNTIL_CLOSED, REFUSED, b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE)
PIECES = st.sampled_from(
    [bytes([byte]) for byte in b"\r\n\0\t :;,/-09aF\x7f\x80\xff"]
    + [b"\r\n", b"\r\n\r\n", b"\r\n ", b"0\r\n\r\n", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n"]
    + [b"HTTP/1.1 101 X\r\n\r\n", b"Connection: close\r\n", b"Content-Encoding: gzip\r\n", b"x" * 70_000, WHOLE]
)


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    said = draw(st.sampled_from(ANSWERS))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(said)))
        taken = draw(st.sampled_from((0, 0, 1, 2, 20)))
        said = said[:at] + draw(st.just(b"") | PIECES) + said[at + taken :]
    return said[: draw(st.integers(0, len(said)))] if draw(st.integers(0, 2)) == 0 else said


class _Speaker:
    """Says `said` to every request, and then hangs up."""

    def __init__(self) -> None:
        self.said = b""
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"}")
            writer.write(self.said)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def speaker() -> AsyncIterator[_Speaker]:
    speaking = _Speaker()
    server = await asyncio.start_server(speaking.serve, "127.0.0.1", 0)
    async with server:
        speaking.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield speaking


async def test_whatever_a_replica_answers_clients_are_told_and_nothing_else_comes_of_it(
    bench: BenchFactory, caplog: pytest.LogCaptureFixture
) -> None:
    b = await bench(0, first_byte_timeout_seconds=2.0, chunk_timeout_seconds=2.0)
    examples: list[bytes] = []

    @settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(answers())
    def collect(example: bytes) -> None:
        examples.append(example)

    collect()
    outcomes: set[int | str] = set()
    limits = {"max_line_size": 1 << 20, "max_field_size": 1 << 20}
    async with speaker() as replica, aiohttp.ClientSession(**limits) as client:  # type: ignore[arg-type]
        b.router.fleet.add_static(replica.url)
        for number, said in enumerate([*ANSWERS, *examples]):
            replica.said = said
            try:
                async with client.post(b.url, json=chat(number % 2 == 0)) as response:
                    await asyncio.wait_for(response.read(), 10)
                outcomes.add(response.status)
                assert response.status in (502, 504) or b"%d" % response.status in said, said
            except aiohttp.ClientPayloadError:
                outcomes.add("cut")
        await b.settled()
    assert outcomes >= {200, 400, 502, "cut"}
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
