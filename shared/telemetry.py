"""Logging: one line per event on stderr, `key=value`, so that people read it and machines split it.

    2026-01-31T12:00:00.123Z info router.follower: replica joined id=replica-1 blocks=812

    log.info("replica joined", extra=fields(id=record.id, blocks=812))

Prompts and secrets are never handed to a logger. Line breaks in values are escaped: a value cannot forge a line.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from functools import lru_cache
from typing import Any, TextIO

__all__ = ["fields", "set_up_logging"]

_FIELDS = "fields"
_MAX_VALUE_CHARACTERS = 2000
_SPECIAL = re.compile(r'[ ="\\]')
_BATCH_SECONDS = 0.05
_MOST_LINES = 1000
_QUIET = ("aiohttp.access", "asyncio", "urllib3", "httpx", "filelock", "huggingface_hub", "transformers", "matplotlib")
"""Libraries whose news below a warning is not ours to tell."""


def fields(**values: Any) -> dict[str, Any]:
    """For `extra=`: what the event is about, apart from its name."""
    return {_FIELDS: values}


def set_up_logging(level: str, program: str) -> None:
    """The whole process logs to stderr from now on; `program` opens every line's source where a module has no name."""
    handler = _BatchingHandler(sys.stderr)
    handler.setFormatter(_LineFormatter(program))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.getLogger("aiohttp.server").addFilter(_without_what_is_not_http)
    logging.captureWarnings(True)


def _without_what_is_not_http(record: logging.LogRecord) -> bool:
    """A client that does not speak HTTP is no error of ours, and what it sent may hold a key or a prompt."""
    if record.exc_info and record.exc_info[0] and record.exc_info[0].__module__ == "aiohttp.http_exceptions":
        record.msg, record.args = f"a client sent what is not HTTP ({record.exc_info[0].__name__})", ()
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.exc_info = record.exc_text = None
        return logging.getLogger(record.name).isEnabledFor(logging.INFO)
    return True


class _BatchingHandler(logging.Handler):
    """News is written some milliseconds later, many lines at once; warnings and all before them at once.

    A line that has not been written when the process is killed outright is lost; any other end writes it.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: list[str] = []
        self._news = threading.Event()
        threading.Thread(target=self._write_news, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record))
        except Exception:
            self.handleError(record)
            return
        if record.levelno >= logging.WARNING or len(self._lines) >= _MOST_LINES:
            self.flush()
        elif len(self._lines) == 1:
            self._news.set()

    def flush(self) -> None:
        self.acquire()
        try:
            lines, self._lines = self._lines, []
            if lines:
                self._stream.write("\n".join(lines) + "\n")
                self._stream.flush()
        except (OSError, ValueError):
            pass  # nobody reads our log any more
        finally:
            self.release()

    def _write_news(self) -> None:
        while True:
            self._news.wait()
            time.sleep(_BATCH_SECONDS)
            self._news.clear()
            self.flush()


class _LineFormatter(logging.Formatter):
    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        seconds = _second(int(record.created))
        source = self._program if record.name in ("root", "__main__") else record.name
        parts = [f"{seconds}.{int(record.msecs):03d}Z {record.levelname.lower()} {source}:"]
        parts.append(_one_line(record.getMessage()))
        parts += [f"{name}={_quoted(value)}" for name, value in getattr(record, _FIELDS, {}).items()]
        if record.exc_info:
            parts.append(f"traceback={_quoted(self.formatException(record.exc_info))}")
        return " ".join(parts)


@lru_cache(2)
def _second(unix_seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_seconds))


def _one_line(text: str) -> str:
    if text.isprintable():
        return text[:_MAX_VALUE_CHARACTERS]
    escaped = (character if character.isprintable() else repr(character)[1:-1] for character in text)
    return "".join(escaped)[:_MAX_VALUE_CHARACTERS]


def _quoted(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if text and text.isprintable() and _SPECIAL.search(text) is None:
        return text[:_MAX_VALUE_CHARACTERS]
    return '"' + _one_line(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'
