"""CPU time and memory of a process and all its descendants, as Linux tells them."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cpu_seconds", "resident_bytes"]

_PROC = Path("/proc")
# Positions in /proc/<pid>/stat behind the name, the process state being 0.
_PARENT, _CPU, _RESIDENT_PAGES = 1, slice(11, 15), 21


def cpu_seconds(pid: int) -> float:
    """Of user and system, children that ended included."""
    return sum(sum(map(int, figures[_CPU])) for figures in _family(pid)) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    return sum(int(figures[_RESIDENT_PAGES]) for figures in _family(pid)) * os.sysconf("SC_PAGE_SIZE")


def _family(pid: int) -> list[list[str]]:
    processes = {process: figures for process in _process_ids() if (figures := _stat(process))}
    family = [pid]
    for parent in family:
        family += [process for process, figures in processes.items() if int(figures[_PARENT]) == parent]
    return [processes[process] for process in family if process in processes]


def _process_ids() -> list[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> list[str]:
    try:
        # The name in parentheses may hold anything.
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return []
