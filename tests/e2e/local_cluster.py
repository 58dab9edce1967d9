"""A real `warmroute up` for a test, and a look at the processes that belong to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["RunningUp", "alive", "descendants", "running_up"]

_ROOT = Path(__file__).parents[2]
_READY_SECONDS = 60.0
_STOP_SECONDS = 60.0


class RunningUp:
    """`stdout` and `stderr` hold the lines so far."""

    def __init__(self, *arguments: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("WARMROUTE_")}
        clean.pop("REDIS_URL", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "warmroute", "up", *arguments],
            cwd=_ROOT,
            env=clean,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self._first_line = threading.Event()
        self._readers = [threading.Thread(target=self._read, args=(number,), daemon=True) for number in (1, 2)]
        for reader in self._readers:
            reader.start()

    def wait_ready(self) -> str:
        """The router's URL."""
        assert self._first_line.wait(_READY_SECONDS), "".join(self.stderr)
        assert self.stdout, "".join(self.stderr)
        return self.stdout[0].removeprefix("ready ").strip()

    def interrupt(self) -> None:
        """As Ctrl-C in a terminal does: to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self) -> int:
        code = self.process.wait(_STOP_SECONDS)
        for reader in self._readers:
            reader.join(5)
        return code

    def _read(self, number: int) -> None:
        pipe, lines = (self.process.stdout, self.stdout) if number == 1 else (self.process.stderr, self.stderr)
        assert pipe is not None
        with pipe:
            for line in pipe:
                lines.append(line)
                if number == 1:
                    self._first_line.set()
        self._first_line.set()


@contextmanager
def running_up(*arguments: str) -> Iterator[RunningUp]:
    up = RunningUp(*arguments)
    try:
        yield up
    finally:
        if up.process.poll() is None:
            up.process.send_signal(signal.SIGTERM)
        up.wait()


def descendants(pid: int) -> set[tuple[int, str]]:
    """Every process below `pid`, as (process id, start time): a pair that is never used twice."""
    parents: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if (stat := _stat(int(entry.name))) is not None:
            parents.setdefault(int(stat[1]), []).append((int(entry.name), stat[19]))
    found: set[tuple[int, str]] = set()
    below = [pid]
    while below:
        children = parents.get(below.pop(), [])
        found.update(children)
        below += [child for child, _ in children]
    return found


def alive(processes: set[tuple[int, str]]) -> set[tuple[int, str]]:
    """Those that still run; one that has ended but was not waited for does not."""
    return {one for one in processes if (stat := _stat(one[0])) is not None and stat[19] == one[1] and stat[0] != "Z"}


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat after the name: state, parent, ..., start time at 19."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
