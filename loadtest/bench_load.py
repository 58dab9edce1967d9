"""The load generator of the router's bench: keep-alive connections over raw sockets, little work per request.

    python -m loadtest.bench_load < job.json > figures.json

Closed loop: every connection sends its next request when the last is answered. Open loop (`rate`): arrivals are
scheduled beforehand and latency counts from the scheduled time, whatever the server does meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import deque
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop

from loadtest.bench_prompts import chat_body, system_prompts
from loadtest.process_figures import cpu_seconds

__all__ = ["Figures", "Job"]

_DONE = b"data: [DONE]"
_LAST_CHUNK = b"0\r\n\r\n"


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
        self._run.lost()

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
        self._chooser = random.Random(job.seed)
        systems = system_prompts()
        self._bodies = deque(
            chat_body(self._chooser.choice(systems), job.seed * 1_000_000 + number, self._chooser, stream=job.stream)
            for number in range(job.requests)
        )
        self._idle: list[_Connection] = []
        self._due: deque[float] = deque()
        self._latencies: list[float] = []
        self._failed = 0
        self._over = asyncio.Event()

    async def play(self) -> Figures:
        loop, job = asyncio.get_running_loop(), self.job
        for number in range(job.connections):
            parts = urlsplit(job.urls[number % len(job.urls)])
            host, port = parts.hostname or "", parts.port or 80
            _, connection = await loop.create_connection(lambda: _Connection(f"{host}:{port}", self), host, port)  # noqa: B023
            self._idle.append(connection)
        cpu, begun = _cpu(job), time.perf_counter()
        if job.rate is None:
            for connection in self._take_idle():
                self._send(connection, time.perf_counter())
        else:
            await self._arrive(job.rate, begun)
        await self._over.wait()
        ended = time.perf_counter()
        latencies = [1e3 * seconds for seconds in self._latencies]
        return Figures(job.requests, self._failed, ended - begun, _cpu(job) - cpu, latencies)

    def answered(self, connection: _Connection, well: bool, seconds: float) -> None:
        self._latencies.append(seconds)
        self._failed += not well
        if len(self._latencies) == self.job.requests:
            self._over.set()
        elif self._due:
            self._send(connection, self._due.popleft())
        elif self.job.rate is None and self._bodies:
            self._send(connection, time.perf_counter())
        else:
            self._idle.append(connection)

    def lost(self) -> None:
        if not self._over.is_set():
            raise SystemExit("a connection was lost")

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


async def _play(job: Job) -> Figures:
    return await _Run(job).play()


if __name__ == "__main__":
    wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(_play(wanted))))
