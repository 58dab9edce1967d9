"""Logging: one line per event on stderr, `key=value`, so that people read it and machines split it; or JSON.

    2026-01-31T12:00:00.123Z info router.follower: replica joined id=replica-1 blocks=812

    log.info("replica joined", extra=fields(id=record.id, blocks=812))
    tell(log, "request", {"id": ..., "status": 200})        the same in a third of the time, for what is told often

Prompts and secrets are never handed to a logger. Line breaks in values are escaped: a value cannot forge a line.
"""

from __future__ import annotations

import logging
import os
import re
import select
import stat
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TextIO

from shared.log_json import JsonFormatter

__all__ = ["dropped_log_lines", "fields", "set_up_logging", "tell"]

_FIELDS = "fields"
_MAX_VALUE_CHARACTERS = 2000
_PLAIN = re.compile(rf"[!#-<>-\[\]-~]{{1,{_MAX_VALUE_CHARACTERS}}}")
"""Nothing to quote: ASCII without spaces, quotation marks, equals signs and backslashes."""
_BATCH_SECONDS = 0.05
_HURRY_LINES = 1000
_MOST_LINES = 10_000
_LAST_WORDS_SECONDS = 1.0
_QUIET = ("aiohttp.access", "asyncio", "urllib3", "httpx", "filelock", "huggingface_hub", "transformers", "matplotlib")
"""Libraries whose news below a warning is not ours to tell."""


def fields(**values: Any) -> dict[str, Any]:
    """For `extra=`: what the event is about, apart from its name."""
    return {_FIELDS: values}


def tell(logger: logging.Logger, event: str, values: dict[str, Any]) -> None:
    """News for any handler, of which nothing is known but this: no stack is walked for it."""
    if logger.isEnabledFor(logging.INFO):
        logger.handle(_News(logger.name, event, values))


class _News(logging.LogRecord):
    def __init__(self, name: str, event: str, values: dict[str, Any]) -> None:
        now = time.time()
        self.__dict__.update(_BLANK, name=name, msg=event, created=now, msecs=now % 1.0 * 1000, fields=values)


_BLANK = logging.makeLogRecord({"levelno": logging.INFO, "levelname": "INFO"}).__dict__


def set_up_logging(level: str, program: str, form: str = "text") -> None:
    """The whole process logs to stderr from now on; `program` opens every line's source where a module has no name.

    `form` is `text` or `json`.
    """
    handler = _BatchingHandler(sys.stderr)
    json = JsonFormatter(program, _time_of, _fields_of, _MAX_VALUE_CHARACTERS)
    handler.setFormatter(json if form == "json" else _LineFormatter(program))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.getLogger("aiohttp.server").addFilter(_without_what_is_not_http)
    logging.captureWarnings(True)


def dropped_log_lines() -> int:
    """Lines of this process that were to be logged and could not be written, ever."""
    return sum(
        handler.dropped_lines for handler in logging.getLogger().handlers if isinstance(handler, _BatchingHandler)
    )


def _without_what_is_not_http(record: logging.LogRecord) -> bool:
    """A client that does not speak HTTP is no error of ours, and what it sent may hold a key or a prompt."""
    if record.exc_info and record.exc_info[0] and record.exc_info[0].__module__ == "aiohttp.http_exceptions":
        record.msg, record.args = f"a client sent what is not HTTP ({record.exc_info[0].__name__})", ()
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.exc_info = record.exc_text = None
        return logging.getLogger(record.name).isEnabledFor(logging.INFO)
    return True


class _BatchingHandler(logging.Handler):
    """Lines are written by a thread of its own, so nobody waits for whoever reads them: not the event loop above all.

    News is written some milliseconds later, many lines at once; a warning hurries all before it. What may wait is
    bounded: lines beyond are dropped, as are those that cannot be written, and the next line written tells how many.
    What has not been written when the process is killed outright is lost; any other end writes it, within a second.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._write = _writer(stream)
        self._changed = threading.Condition(self.lock)  # held by logging itself around `emit`, and `flush` at the end
        self._lines: list[str] = []
        self._hurry = False
        self._writing = False
        self._dropped = 0
        self.dropped_lines = 0
        """Of which the log tells, or will when it can."""
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        if len(self._lines) >= _MOST_LINES:
            self._dropped += 1
            self.dropped_lines += 1
            return
        self._lines.append(line)
        if record.levelno >= logging.WARNING or len(self._lines) >= _HURRY_LINES:
            self._hurry = True
        if self._hurry or len(self._lines) == 1:
            self._changed.notify_all()

    def flush(self) -> None:
        """Return when everything has been written, or after a second."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._lines or self._writing), _LAST_WORDS_SECONDS)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                self._changed.wait_for(lambda: self._hurry, _BATCH_SECONDS)
                lines, self._lines = self._lines, []
                dropped = self._dropped
                self._hurry, self._writing = False, True
            told = [self.format(_drop_record(dropped))] if dropped else []
            try:
                self._write("\n".join(told + lines) + "\n")
                untold = -dropped
            except (OSError, ValueError):  # a full disk, a reader that is gone
                untold = len(lines)
            with self._changed:
                self._dropped += untold
                self.dropped_lines += max(0, untold)
                self._writing = False
                self._changed.notify_all()


def _drop_record(lines: int) -> logging.LogRecord:
    event = {"name": "log", "levelname": "WARNING", "msg": "lines could not be written", **fields(lines=lines)}
    return logging.makeLogRecord(event)


def _writer(stream: TextIO) -> Callable[[str], None]:
    """Writes the whole of a text, however long its reader takes; raises OSError where that cannot be.

    Past the stream's own buffer: a thread that waits inside it would keep the interpreter from ending.
    """
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):

        def write_text(text: str) -> None:
            stream.write(text)
            stream.flush()

        return write_text

    # Several processes may write to one pipe: what is no longer than this is not mixed with others' there.
    longest = select.PIPE_BUF if stat.S_ISFIFO(os.fstat(descriptor).st_mode) else sys.maxsize

    def write(text: str) -> None:
        rest = memoryview(text.encode(errors="backslashreplace"))
        while rest:
            piece = rest if len(rest) <= longest else rest[: _whole_lines(rest, longest)]
            try:
                rest = rest[os.write(descriptor, piece) :]
            except BlockingIOError:
                select.select((), (descriptor,), ())

    return write


def _whole_lines(text: memoryview, longest: int) -> int:
    """How much of it to write: as many lines as fit, or one that does not."""
    end = bytes(text[:longest]).rfind(b"\n")
    return end + 1 or longest


class _LineFormatter(logging.Formatter):
    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        source = self._program if record.name in ("root", "__main__") else record.name
        parts = [f"{_time_of(record)} {record.levelname.lower()} {source}:"]
        parts.append(_one_line(record.getMessage()))
        is_plain = _PLAIN.fullmatch
        parts += [
            f"{name}={value}" if type(value) is str and is_plain(value) else f"{name}={_quoted(value)}"
            for name, value in _fields_of(record).items()
        ]
        if record.exc_info:
            parts.append(f"traceback={_quoted(self.formatException(record.exc_info))}")
        return " ".join(parts)


def _time_of(record: logging.LogRecord) -> str:
    return f"{_second(int(record.created))}.{int(record.msecs):03d}Z"


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    fields_of_record: dict[str, Any] = getattr(record, _FIELDS, {})
    return fields_of_record


@lru_cache(2)
def _second(unix_seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_seconds))


def _one_line(text: str) -> str:
    if text.isprintable():
        return text[:_MAX_VALUE_CHARACTERS]
    escaped = (character if character.isprintable() else repr(character)[1:-1] for character in text)
    return "".join(escaped)[:_MAX_VALUE_CHARACTERS]


def _quoted(value: Any) -> str:
    kind = type(value)
    if kind is int:
        return str(value)
    text = f"{value:.6g}" if kind is float else str(value)
    if _PLAIN.fullmatch(text):
        return text
    return '"' + _one_line(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'
