"""The load generator of the router's bench: keep-alive connections over raw sockets, little work per request.

    python -m loadtest.bench_load < job.json > figures.json

Closed loop: every connection sends its next request when the last is answered. Open loop (`rate`): arrivals are
scheduled beforehand and latency counts from the scheduled time, whatever the server does meanwhile. A lost connection,
or no answer for long, ends the job with an error: it never hangs.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import deque
from functools import partial
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop

from loadtest.bench_prompts import TAIL_WORDS, chat_body, system_prompts
from loadtest.process_figures import cpu_seconds

__all__ = ["Figures", "Job", "JobError", "play"]

_DONE = b"data: [DONE]"
_LAST_CHUNK = b"0\r\n\r\n"
_LONGEST_SILENCE_SECONDS = 30.0
_PIPE_BYTES = 32_768


class Job(msgspec.Struct, frozen=True):
    urls: list[str]
    """More than one: connections are shared out among them."""
    pid: int | None
    """Whose CPU time is taken."""
    connections: int
    requests: int
    stream: bool = False
    rate: float | None = None
    seed: int = 0
    tail_words: int = TAIL_WORDS
    """Of each prompt, beside the system prompt that it shares with others; a word is a token."""


class JobError(Exception):
    """The job cannot be done. The message says why."""


class Figures(msgspec.Struct, frozen=True):
    requests: int
    failed: int
    seconds: float
    cpu_seconds: float
    latencies_ms: list[float]
    """Until the answer's end; of a stream, until its first byte."""


class _Connection(asyncio.Protocol):
    def __init__(self, host: str, run: _Run) -> None:
        self._head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\n" % (
            host.encode()
        )
        self._run = run
        self._received = b""
        self._since = 0.0
        self._first_byte = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._lost = asyncio.Event()

    def ask(self, body: bytes, since: float) -> None:
        self._since = since
        self._received = b""
        self._transport.write(b"%bContent-Length: %d\r\n\r\n%b" % (self._head, len(body), body))

    def data_received(self, data: bytes) -> None:
        if not self._received:
            self._first_byte = time.perf_counter()
            self._received = data
        elif self._run.job.stream:
            self._received = self._received[-64:] + data if len(self._received) > 4096 else self._received + data
        else:
            self._received += data
        if (well := self._verdict()) is not None:
            ended = self._first_byte if self._run.job.stream else time.perf_counter()
            self._run.answered(self, well, ended - self._since)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost.set()
        self._run.lost()

    async def close(self) -> None:
        self._transport.abort()
        await self._lost.wait()

    def _verdict(self) -> bool | None:
        """None until the answer is complete."""
        received = self._received
        if self._run.job.stream:
            return _DONE in received if received.endswith(_LAST_CHUNK) else None
        head_end = received.find(b"\r\n\r\n")
        if head_end < 0:
            return None
        head = received[:head_end].lower()
        at = head.find(b"content-length:")
        if at >= 0:
            complete = len(received) >= head_end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0])
        else:
            complete = received.endswith(_LAST_CHUNK)
        return received.startswith(b"HTTP/1.1 200") if complete else None


class _Run:
    """One job, from its first request to its last answer."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._loop = asyncio.get_running_loop()
        self._chooser = random.Random(job.seed)
        systems = system_prompts()
        self._bodies = deque(
            chat_body(
                self._chooser.choice(systems),
                job.seed * 1_000_000 + number,
                self._chooser,
                stream=job.stream,
                tail_words=job.tail_words,
            )
            for number in range(job.requests)
        )
        self._idle: list[_Connection] = []
        self._due: deque[float] = deque()
        self._latencies: list[float] = []
        self._failed = 0
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def play(self) -> Figures:
        """Raises JobError."""
        connections: list[_Connection] = []
        try:
            for number in range(self.job.connections):
                parts = urlsplit(self.job.urls[number % len(self.job.urls)])
                host, port = parts.hostname or "", parts.port or 80
                made = partial(_Connection, f"{host}:{port}", self)
                connections.append((await self._loop.create_connection(made, host, port))[1])
            self._idle += connections
            return await self._measured()
        finally:
            self._over.cancel()
            for connection in connections:
                await connection.close()

    async def _measured(self) -> Figures:
        job = self.job
        cpu, begun = _cpu(job), time.perf_counter()
        arriving = None
        if job.rate is None:
            for connection in self._take_idle():
                self._send(connection, time.perf_counter())
        else:
            arriving = asyncio.create_task(self._arrive(job.rate, begun))
        try:
            await self._ended()
        finally:
            if arriving is not None:
                arriving.cancel()
        ended = time.perf_counter()
        latencies = [round(1e3 * seconds, 3) for seconds in self._latencies]
        return Figures(job.requests, self._failed, ended - begun, _cpu(job) - cpu, latencies)

    def answered(self, connection: _Connection, well: bool, seconds: float) -> None:
        self._latencies.append(seconds)
        self._failed += not well
        if len(self._latencies) == self.job.requests:
            if not self._over.done():
                self._over.set_result(None)
        elif self._due:
            self._send(connection, self._due.popleft())
        elif self.job.rate is None and self._bodies:
            self._send(connection, time.perf_counter())
        else:
            self._idle.append(connection)

    def lost(self) -> None:
        # An exception that leaves a callback ends nothing: the future is what tells.
        if not self._over.done():
            self._over.set_exception(JobError(f"a connection was lost {self._standing}"))

    @property
    def _standing(self) -> str:
        return f"after {len(self._latencies)} of {self.job.requests} answers"

    async def _ended(self) -> None:
        """Raises JobError."""
        answered = -1
        while not self._over.done():
            if len(self._latencies) == answered:
                raise JobError(f"nothing was answered for {_LONGEST_SILENCE_SECONDS:g} s {self._standing}")
            answered = len(self._latencies)
            await asyncio.wait((self._over,), timeout=_LONGEST_SILENCE_SECONDS)
        self._over.result()

    async def _arrive(self, rate: float, begun: float) -> None:
        due = begun
        for _ in range(self.job.requests):
            due += self._chooser.expovariate(rate)
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            if self._idle:
                self._send(self._idle.pop(), due)
            else:
                self._due.append(due)

    def _take_idle(self) -> list[_Connection]:
        taken, self._idle = self._idle[: len(self._bodies)], []
        return taken

    def _send(self, connection: _Connection, since: float) -> None:
        connection.ask(self._bodies.popleft(), since)


def _cpu(job: Job) -> float:
    return cpu_seconds(job.pid) if job.pid is not None else 0.0


async def play(job: Job) -> Figures:
    """Raises JobError."""
    return await _Run(job).play()


if __name__ == "__main__":
    wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    try:
        rest = memoryview(msgspec.json.encode(uvloop.run(play(wanted))))
        while rest:  # no more at a time than a pipe surely takes
            rest = rest[os.write(sys.stdout.fileno(), rest[:_PIPE_BYTES]) :]
    except (JobError, OSError) as error:
        sys.exit(str(error))
