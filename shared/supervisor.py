"""Child processes that are ready when they say so, that tell why when they fail, and that never outlive their parent.

    parent  --- stdin: kept open, never written; its end of file is the parent's death ---->  child
            <-- stdout: `ready <url>` ------------------------------------------------------
            <-- stderr: log lines, passed on with the child's name in front ----------------

Each child has a session of its own, so that Ctrl-C in a terminal reaches the parent alone, which then stops them in
order. Plain threads and blocking calls: usable from anywhere.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, TextIO

__all__ = ["SUPERVISED", "Child", "ChildFailedError", "Program", "die_with_parent", "say_ready", "stop_all"]

SUPERVISED = "WARMROUTE_SUPERVISED"
"""In the environment of a child that must not outlive its parent."""
_READY = "ready "
_MAX_LINE_BYTES = 16384
_KEPT_LINES = 20
_KILL_SECONDS = 5.0


class ChildFailedError(Exception):
    """The child ended, or did not get ready in time. The message holds its own last words."""


@dataclass(frozen=True, slots=True)
class Program:
    """A subcommand of warmroute and how to run it. What is secret belongs in `environment`: flags are public."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


class Child:
    """One running program. Starts at once."""

    def __init__(self, program: Program, log: TextIO | None = None) -> None:
        self.program = program
        self.url: str | None = None
        self.started_seconds = time.monotonic()
        self._log = log or sys.stderr
        self._own_name = f"warmroute {program.arguments[0]}: "
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._ready_or_gone = threading.Event()
        inherited = {name: value for name, value in os.environ.items() if name != "WARMROUTE_CONFIG"}
        self._process = subprocess.Popen(  # noqa: S603 - no shell; our own interpreter and program
            [sys.executable, "-m", "warmroute", *program.arguments],
            env={**inherited, **program.environment, SUPERVISED: "1", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_stdout, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_stderr, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def wait_ready(self, timeout_seconds: float) -> str:
        """Its URL, as soon as it says `ready <url>`. Raises ChildFailedError."""
        if not self._ready_or_gone.wait(timeout_seconds):
            raise ChildFailedError(f"{self.program.name} was not ready within {timeout_seconds:g} s")
        if self.url is None:
            raise ChildFailedError(f"{self.program.name} did not start: {self.last_words()}")
        return self.url

    def wait(self, timeout_seconds: float) -> bool:
        """Whether it has ended within that time."""
        try:
            self._process.wait(max(0.0, timeout_seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_words(self) -> str:
        """The last line it wrote, without its own name, or how it ended."""
        for reader in self._readers:
            reader.join(1.0)
        line = self._last_lines[-1] if self._last_lines else f"exit code {self.exit_code}"
        return line.removeprefix(self._own_name)

    def terminate(self) -> None:
        """Ask it to stop: drain, then exit."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill it if it still runs, and release its pipes."""
        self.kill()
        self.wait(_KILL_SECONDS)
        for reader in self._readers:
            reader.join(1.0)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        # send_signal looks first whether the process has been waited for, so it never meets a recycled process id.
        self._process.send_signal(number)

    def _read_stdout(self, pipe: BinaryIO) -> None:
        for line in _lines(pipe):
            if self.url is None and line.startswith(_READY):
                self.url = line.removeprefix(_READY).strip()
                self._ready_or_gone.set()
            else:
                self._pass_on(line)
        self._ready_or_gone.set()

    def _read_stderr(self, pipe: BinaryIO) -> None:
        for line in _lines(pipe):
            self._last_lines.append(line)
            if not line.startswith(self._own_name):  # why it ends: `last_words` are for its parent to tell, once
                self._pass_on(line)

    def _pass_on(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads our log any more
            self._log.write(f"[{self.program.name}] {line}\n")
            self._log.flush()


def stop_all(children: Iterable[Child], grace_seconds: float) -> None:
    """Ask all to stop, give them that long together, and kill whoever is left. Pipes are released."""
    remaining = list(children)
    for child in remaining:
        child.terminate()
    deadline = time.monotonic() + grace_seconds
    for child in remaining:
        child.wait(deadline - time.monotonic())
    for child in remaining:
        child.close()


def die_with_parent() -> None:
    """In a child: end at once when the parent is gone, however it went. Does nothing in any other process."""
    if os.environ.pop(SUPERVISED, None):
        threading.Thread(target=_await_end_of_stdin, name="parent-watch", daemon=True).start()


def say_ready(url: str) -> None:
    """What a parent, or whoever started this process, waits for on stdout. Serving goes on where nobody reads it."""
    try:
        sys.stdout.write(f"{_READY}{url}\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the interpreter would try again, and fail, at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _await_end_of_stdin() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def _lines(pipe: BinaryIO) -> Iterable[str]:
    """Lines as they come, overlong ones in pieces, until the pipe's end."""
    while raw := pipe.readline(_MAX_LINE_BYTES):
        yield raw.decode(errors="replace").rstrip("\r\n")
