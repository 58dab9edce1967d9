"""`warmroute router --workers N`: N routers on one port, and the parent that keeps them running.

    parent   holds the port without listening, starts workers, passes signals on, serves nobody
    worker   a whole router with a listening socket of its own on that port (SO_REUSEPORT): the kernel deals out
             connections; workers know each other's work through Redis, as any routers do, and the rest by `siblings`

A worker that dies takes its own connections along, nobody else's, and is started again: at once the first time, later
and later (up to ten seconds) while it keeps dying. One that cannot start at all ends everything, with its status.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from shared.settings import RouterSettings
from shared.supervisor import SUPERVISED, say_ready
from shared.telemetry import fields

__all__ = ["Assignment", "CannotShareError", "Workers", "share"]

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0
_SETTLED_SECONDS = 60.0
"""A worker that ran for so long did not die of its start."""
_LAST_WORDS_SECONDS = 5.0
_BIND_ATTEMPTS = 8
_LONGEST_FOLDER = 100
"""Bytes: the path of a Unix socket has at most 107."""

_logger = logging.getLogger(__name__)


class CannotShareError(Exception):
    """This machine cannot deal out one port's connections. The message says what to do."""


class Assignment(msgspec.Struct):
    """What a worker is told on stdin."""

    settings: RouterSettings
    """As it alone is to follow them."""
    folder: str
    """Where workers find each other's sockets."""
    number: int
    count: int


class Workers:
    """`run` it once."""

    def __init__(self, settings: RouterSettings) -> None:
        """Raises CannotShareError."""
        if sys.platform != "linux" or not hasattr(socket, "SO_REUSEPORT"):
            message = "--workers above 1 needs Linux (SO_REUSEPORT): run several routers behind a load balancer instead"
            raise CannotShareError(message)
        self._settings = settings
        self._count = settings.workers
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._serving: set[asyncio.subprocess.Process] = set()
        self._ready: set[int] = set()
        """Numbers of workers that have been ready once."""
        self._all_ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._status = 0
        self._url = ""

    async def run(self) -> int:
        """Until a signal, or until one cannot start.

        Raises OSError when the address cannot be bound, CannotShareError where workers cannot reach each other.
        """
        with ExitStack() as stack:
            port = _hold(self._settings.host, self._settings.port, stack)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-")))
            if len(os.fsencode(folder)) > _LONGEST_FOLDER:
                raise CannotShareError(f"workers cannot meet in {folder}: set TMPDIR to a folder with a shorter name")
            loop = asyncio.get_running_loop()
            for stop in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(stop, self._stop)
            loop.add_signal_handler(signal.SIGHUP, self._reload)
            async with asyncio.TaskGroup() as group:
                for number in range(self._count):
                    own = share(self._settings, port, number)
                    group.create_task(self._keep(Assignment(own, str(folder), number, self._count)))
                group.create_task(self._announce())
            return self._status

    async def _announce(self) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (self._all_ready, self._stopping)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self._all_ready.is_set() and not self._stopping.is_set():
            say_ready(self._url)

    async def _keep(self, assignment: Assignment) -> None:
        number, pause_seconds = assignment.number, _FIRST_PAUSE_SECONDS
        while not self._stopping.is_set():
            begun = time.monotonic()
            status = await self._run_one(assignment)
            if self._stopping.is_set():
                # Asked to stop before it could listen for that, a worker ends by the signal: that is in order too.
                self._status = self._status or int(status not in (0, -signal.SIGTERM))
                return
            if number not in self._ready:
                if status < 0:  # else it has said why
                    _logger.error("a worker was killed while it started", extra=fields(worker=number, signal=-status))
                self._status = status if status > 0 else 1
                self._stop()
                return
            if time.monotonic() - begun > _SETTLED_SECONDS:
                pause_seconds = _FIRST_PAUSE_SECONDS
            about = fields(worker=number, status=status, pause_seconds=pause_seconds)
            _logger.error("a worker ended by itself: it is started again", extra=about)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

    async def _run_one(self, assignment: Assignment) -> int:
        """From start to end: its exit status, negative for the signal that ended it."""
        try:
            # A session of its own: Ctrl-C in a terminal is for the parent to pass on.
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "router.worker"),
                env={**os.environ, SUPERVISED: "1"},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:  # no memory, too many processes
            _logger.error("a worker cannot be started", extra=fields(reason=error.strerror))
            return 1
        self._running[assignment.number] = process
        greeting = asyncio.ensure_future(self._greet(process, assignment))
        try:
            if self._stopping.is_set():
                process.terminate()
            return await self._end_of(process)
        finally:
            greeting.cancel()
            self._serving.discard(process)
            del self._running[assignment.number]

    async def _greet(self, process: asyncio.subprocess.Process, assignment: Assignment) -> None:
        """Tell it what to be, and hear when it is."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(assignment) + b"\n")
        word, _, url = (await process.stdout.readline()).decode().partition(" ")
        if word == "ready":
            self._serving.add(process)
            self._url = url.strip()
            self._ready.add(assignment.number)
            if len(self._ready) == self._count:
                self._all_ready.set()

    async def _end_of(self, process: asyncio.subprocess.Process) -> int:
        """Its status. Where it was asked to stop and does not, it is killed."""
        ended = asyncio.ensure_future(process.wait())
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await asyncio.wait((ended,), timeout=self._settings.grace_seconds + _LAST_WORDS_SECONDS)
        if not ended.done():
            process.kill()
        return await ended

    def _stop(self) -> None:
        """All of them; told a second time, they hurry."""
        # A signal that has not been taken yet would swallow a second one of its kind.
        _tell(self._running.values(), signal.SIGINT if self._stopping.is_set() else signal.SIGTERM)
        self._stopping.set()

    def _reload(self) -> None:
        """Those that serve: whoever does not yet would die of it, and reads its files anyway."""
        _tell(self._serving, signal.SIGHUP)


def _tell(processes: Iterable[asyncio.subprocess.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            process.send_signal(number)


def share(settings: RouterSettings, port: int, number: int) -> RouterSettings:
    """What one worker is to follow: its part of what bounds the router as a whole, and files of its own."""
    log = settings.decision_log
    return replace(
        settings,
        port=port,
        workers=1,
        max_in_flight=-(-settings.max_in_flight // settings.workers),
        max_queue=-(-settings.max_queue // settings.workers),
        decision_log=None if log is None else str(_numbered(Path(log), number)),
    )


def _hold(host: str, port: int, stack: ExitStack) -> int:
    """Keep the port for the workers, without taking connections. Raises OSError where somebody else has it."""
    for attempt in range(_BIND_ATTEMPTS):
        try:
            return _hold_once(host, port, stack)
        except OSError as error:
            # Between the two binds of a port that was free, somebody else was given it.
            if port or error.errno != errno.EADDRINUSE or attempt == _BIND_ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _hold_once(host: str, port: int, stack: ExitStack) -> int:
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        # Other routers' workers would share it gladly; so we ask first as somebody who shares nothing.
        with socket.socket(family, kind, protocol) as alone:
            port = _bind(alone, (address[0], port, *address[2:]))
        shared = stack.enter_context(socket.socket(family, kind, protocol))
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _bind(shared, (address[0], port, *address[2:]))
    return port


def _bind(bound: socket.socket, address: tuple[object, ...]) -> int:
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if bound.family == socket.AF_INET6:
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    bound.bind(address)
    return int(bound.getsockname()[1])


def _numbered(path: Path, number: int) -> Path:
    """A file of a worker's own: `decisions.jsonl` becomes `decisions-0.jsonl`."""
    return path.with_name(f"{path.stem}-{number}{path.suffix}")
