"""Other routers, installed beside this project and named by a command, put in front of our replicas.

NAME=/path/to/venv/bin/python -m some_router --port {port} --worker-urls {replicas}
"""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.request import urlopen

__all__ = ["Peer", "PeerError", "parse_peer", "program_name", "running_peer", "started"]

_READY_SECONDS = 30.0
_POLL_SECONDS = 0.1
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class PeerError(Exception):
    """It does not start, or cannot be told apart. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    command: str


def parse_peer(told: str) -> Peer:
    """Of `NAME=COMMAND`. Raises ValueError."""
    name, _, command = told.partition("=")
    if not _NAME.fullmatch(name) or "{port}" not in command or "{replicas}" not in command:
        raise ValueError(f"{told!r} is not like NAME=COMMAND, with {{port}} and {{replicas}} in the command")
    return Peer(name, command)


@contextmanager
def running_peer(command: str, replicas: Sequence[str], log: int | IO[str]) -> Iterator[tuple[str, int]]:
    """Its URL and process id, once it answers. `{port}` and `{replicas}` in the command are filled in.

    What it says goes to `log`. Raises PeerError.
    """
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    filled = command.replace("{port}", str(port)).replace("{replicas}", " ".join(replicas))
    url = f"http://127.0.0.1:{port}"
    try:
        arguments = shlex.split(filled)
    except ValueError as error:
        raise PeerError(f"{filled}: {error}") from None
    with started(arguments, log, log) as process:
        deadline = time.monotonic() + _READY_SECONDS
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                said = "" if isinstance(log, int) else f"; what it said is in {log.name}"
                raise PeerError(f"{program_name(command)} does not answer on its port: {filled}{said}")
            time.sleep(_POLL_SECONDS)
        yield url, process.pid


@contextmanager
def started(arguments: list[str], stdout: int | IO[str], stderr: int | IO[str]) -> Iterator[subprocess.Popen[str]]:
    """Raises PeerError where there is no such program."""
    try:
        process = subprocess.Popen(  # noqa: S603 - no shell; ours, or the command that the user named
            arguments, stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL, text=True
        )
    except OSError as error:
        raise PeerError(f"{arguments[0]} cannot be run: {error.strerror}") from None
    with process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_READY_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def program_name(command: str) -> str:
    """Of its program, whoever interprets it."""
    words = [word for word in shlex.split(command) if not word.startswith("-")]
    named = [Path(word).name for word in words if not Path(word).name.startswith("python")]
    return named[0] if named else command


def _answers(url: str) -> bool:
    try:
        with urlopen(f"{url}/v1/models", timeout=_READY_SECONDS) as answer:  # noqa: S310 - a URL of our own
            return bool(answer.status == 200)
    except OSError:
        return False
