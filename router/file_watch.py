"""Files that an operator replaces while the router serves: a look each second, since not every file system tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["FileWatch"]

_PERIOD_SECONDS = 1.0


class _Stamp(NamedTuple):
    """Differs once the file has been written or replaced."""

    modified_ns: int
    size_bytes: int
    inode: int


class FileWatch:
    """Make it before the files are read, so that no change falls between."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._stamps = self._look()

    async def run(self, changed: Callable[[], None]) -> None:
        """Call `changed` after every change, until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_SECONDS)
            stamps = self._look()
            if stamps != self._stamps:
                self._stamps = stamps
                changed()

    def _look(self) -> list[_Stamp | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> _Stamp | None:
    """None where there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return _Stamp(status.st_mtime_ns, status.st_size, status.st_ino)
