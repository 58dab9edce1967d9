"""The bench's load generator ends, whatever its server does; and the probe sees how long a server is held."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from loadtest import bench_load
from loadtest.bench_hold import longest_wait_seconds
from loadtest.bench_load import Figures, Job, JobError, play

Answer = Callable[[asyncio.StreamWriter], None]

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    """Calls `answer` for every piece of a request that comes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 20):
            answer(writer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()


async def load(job: Job) -> Figures:
    """In a loop of its own, as the bench runs it."""
    return await asyncio.wait_for(asyncio.to_thread(lambda: uvloop.run(play(job))), 20)


@pytest.mark.parametrize("rate", [None, 1000.0])
async def test_every_request_is_counted_once(rate: float | None) -> None:
    async with server(lambda writer: writer.write(WHOLE)) as url:
        figures = await load(Job([url], None, connections=2, requests=20, rate=rate))
    assert (figures.requests, figures.failed, len(figures.latencies_ms)) == (20, 0, 20)


@pytest.mark.parametrize("rate", [None, 1000.0])
async def test_a_lost_connection_ends_the_job(rate: float | None) -> None:
    async with server(lambda writer: writer.transport.abort()) as url:
        with pytest.raises(JobError, match="a connection was lost after 0 of 20 answers"):
            await load(Job([url], None, connections=2, requests=20, rate=rate))


@pytest.mark.parametrize("rate", [None, 1000.0])
async def test_a_server_that_falls_silent_ends_the_job(rate: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_load, "_LONGEST_SILENCE_SECONDS", 0.3)
    async with server(lambda writer: None) as url:
        with pytest.raises(JobError, match="nothing was answered"):
            await load(Job([url], None, connections=2, requests=20, rate=rate))


async def test_the_probe_sees_for_how_long_a_server_was_held() -> None:
    held = threading.Event()

    def answer(writer: asyncio.StreamWriter) -> None:
        if not held.is_set():
            time.sleep(0.3)  # holds the loop, which is the point
            held.set()
        writer.write(WHOLE)

    async with server(answer) as url:
        assert 0.3 <= await asyncio.to_thread(longest_wait_seconds, url, held.is_set) < 1.0
