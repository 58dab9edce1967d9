"""Decisions on disk, one JSON object a line, so that other policies can be asked about them later.

    {"type": "decision", "number": 7, "id": "...", "candidates": [...], "chosen": "r1", ...}
    {"type": "first-token", "number": 7, "seconds": 0.31, "cached_tokens": 512}         seconds since its dispatch
    {"type": "dropped", "lines": 12}                                                    that could not be written

Nothing of a prompt stands there but its length and its block keys, which Redis holds too; sessions are digests.
`FILE` grows to a limit, becomes `FILE.1` in place of the one before, and starts anew: at most twice the limit.

A thread of its own encodes and writes. Nobody waits for it: what may wait is bounded, and what is beyond that is
dropped, counted, and told of in the log itself.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import msgspec

from router.placement import Decision
from router.policies.base import Candidate, Request
from shared.blocks import pack_keys
from shared.telemetry import fields

__all__ = ["DecisionLine", "DecisionLog", "DecisionLogError", "DroppedLine", "FirstTokenLine", "Logged", "older"]

_logger = logging.getLogger(__name__)

_MOST_KEYS = 8192
"""Of one prompt: 131,072 tokens in blocks of 16."""
_MOST_WAITING = 1 << 19
"""Keys, candidates and lines: some tens of megabytes."""
_BATCH_SECONDS = 0.25
_BATCH_BYTES = 1 << 18
_LAST_WORDS_SECONDS = 2.0


class DecisionLine(msgspec.Struct, tag_field="type", tag="decision", frozen=True, gc=False):
    """One attempt: what the policy was asked, and what it chose."""

    number: int
    """Unique between two starts of the router; ids are not, since clients may choose them."""
    at: float
    """Unix time in seconds."""
    id: str
    attempt: int
    policy: str
    view: str
    reason: str
    chosen: str
    prompt_tokens: int
    block_size: int
    streamed: bool
    candidates: list[Candidate]
    keys: bytes
    """The first `_MOST_KEYS`, packed as in Redis; base64 in JSON, like the next two."""
    affinity: bytes
    session: bytes


class FirstTokenLine(msgspec.Struct, tag_field="type", tag="first-token", frozen=True, gc=False):
    """Of an answer that is not streamed, the time of all of it."""

    number: int
    seconds: float
    cached_tokens: int | None = None
    """As the engine counted them, if it says so."""


class DroppedLine(msgspec.Struct, tag_field="type", tag="dropped", frozen=True, gc=False):
    lines: int


class DecisionLogError(Exception):
    """It cannot be written. The message says what to do."""


class _Decided(NamedTuple):
    """Becomes a line in the thread that writes it."""

    number: int
    at: float
    id: str
    attempt: int
    request: Request
    decision: Decision

    @property
    def weight(self) -> int:
        return 1 + len(self.decision.candidates) + min(len(self.request.keys), _MOST_KEYS)

    def line(self) -> DecisionLine:
        request, decision = self.request, self.decision
        return DecisionLine(
            number=self.number,
            at=self.at,
            id=self.id,
            attempt=self.attempt,
            policy=decision.policy,
            view=decision.view,
            reason=decision.reason,
            chosen=decision.chosen.replica_id,
            prompt_tokens=request.prompt_tokens,
            block_size=request.block_size,
            streamed=request.streamed,
            candidates=decision.candidates,
            keys=pack_keys(request.keys[:_MOST_KEYS]),
            affinity=request.affinity,
            session=request.session,
        )


class _Answered(NamedTuple):
    number: int
    seconds: float
    cached_tokens: int | None

    @property
    def weight(self) -> int:
        return 1

    def line(self) -> FirstTokenLine:
        return FirstTokenLine(*self)


class Logged:
    """A decision in the log, which waits for its first token."""

    __slots__ = ("_dispatched_at", "_log", "_number")

    def __init__(self, log: DecisionLog, number: int, dispatched_at: float) -> None:
        self._log = log
        self._number = number
        self._dispatched_at = dispatched_at

    def first_token(self, now: float, cached_tokens: int | None) -> None:
        self._log.put(_Answered(self._number, now - self._dispatched_at, cached_tokens))


class DecisionLog:
    """One event loop puts, one thread takes; each counter is written by one of them."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Goes on with the file if it is there. Raises DecisionLogError."""
        self._path = path
        self._max_bytes = max_bytes
        self._torn = self._failing = False
        try:
            self._open()
        except OSError as error:
            raise DecisionLogError(
                f"--decision-log {path} cannot be written ({error.strerror}); name a file that can"
            ) from None
        self._waiting: deque[_Decided | _Answered] = deque()
        self._put = self._taken = 0
        self._refused = self._lost = self._told = 0
        self._next_number = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="decision-log", daemon=True)
        self._thread.start()

    def decided(self, request_id: str, attempt: int, request: Request, decision: Decision, now: float) -> Logged:
        """`now` is the time of dispatch, by the clock that `first_token` will be told."""
        number = self._next_number
        self._next_number += 1
        self.put(_Decided(number, time.time(), request_id, attempt, request, decision))
        return Logged(self, number, now)

    def put(self, news: _Decided | _Answered) -> None:
        weight = news.weight
        if self._put - self._taken + weight > _MOST_WAITING:
            self._refused += 1
            return
        self._put += weight
        self._waiting.append(news)

    def close(self) -> None:
        """Return when everything has been written, or after two seconds."""
        self._closed.set()
        self._thread.join(_LAST_WORDS_SECONDS)

    def _write_all(self) -> None:
        closed = False
        while not closed:
            closed = self._closed.wait(_BATCH_SECONDS)
            while self._write_batch():
                pass
        self._file.close()

    def _write_batch(self) -> bool:
        """True if there may be more."""
        lines: list[bytes] = []
        size = 0
        if untold := self._refused + self._lost - self._told:
            lines.append(_encoded(DroppedLine(untold)))
        while self._waiting and size < _BATCH_BYTES:
            news = self._waiting.popleft()
            self._taken += news.weight
            lines.append(_encoded(news.line()))
            size += len(lines[-1])
        if not lines:
            return False
        try:
            self._write(b"".join(lines))
        except OSError as error:
            if not self._failing:
                _logger.warning("decisions cannot be logged", extra=fields(file=self._path, reason=error.strerror))
            self._failing = True
            self._lost += len(lines) - bool(untold)
            return False
        self._failing = False
        self._told += untold
        return bool(self._waiting)

    def _write(self, text: bytes) -> None:
        if self._bytes and self._bytes + len(text) > self._max_bytes:
            self._file.close()
            self._path.replace(older(self._path))
            self._open()
        rest = memoryview(b"\n" + text if self._torn else text)
        while rest:
            self._torn = True  # if this should fail, half a line may stand there
            written = self._file.write(rest) or 0
            self._bytes += written
            rest = rest[written:]
        self._torn = False

    def _open(self) -> None:
        self._file = FileIO(os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "a+")
        self._bytes = self._file.seek(0, os.SEEK_END)
        self._torn = False
        if self._bytes:  # a router that was killed may have left half a line
            self._file.seek(-1, os.SEEK_END)
            self._torn = self._file.read(1) != b"\n"


def older(path: Path) -> Path:
    """What the file before it is called."""
    return path.with_name(path.name + ".1")


def _encoded(line: DecisionLine | FirstTokenLine | DroppedLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"
