"""Waiting for conditions, never for the clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["eventually", "wait_until"]

_POLL_SECONDS = 0.01


async def eventually(predicate: Callable[[], object], timeout_seconds: float = 10.0, what: str = "condition") -> None:
    """Return as soon as `predicate()` is true; fail the test, naming `what`, when it does not become so."""
    deadline = time.monotonic() + timeout_seconds
    while not predicate():
        assert time.monotonic() < deadline, f"{what} not reached within {timeout_seconds} s"
        await asyncio.sleep(_POLL_SECONDS)


def wait_until(predicate: Callable[[], object], timeout_seconds: float = 10.0, what: str = "condition") -> None:
    """The same outside an event loop."""
    deadline = time.monotonic() + timeout_seconds
    while not predicate():
        assert time.monotonic() < deadline, f"{what} not reached within {timeout_seconds} s"
        time.sleep(_POLL_SECONDS)
