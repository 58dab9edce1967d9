"""Logging: one line per event on stderr, `key=value`, so that people read it and machines split it.

    2026-01-31T12:00:00.123Z info router.follower: replica joined id=replica-1 blocks=812

    log.info("replica joined", extra=fields(id=record.id, blocks=812))

Prompts and secrets are never handed to a logger. Line breaks in values are escaped: a value cannot forge a line.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

__all__ = ["fields", "set_up_logging"]

_FIELDS = "fields"
_MAX_VALUE_CHARACTERS = 2000
_QUIET = ("aiohttp.access", "asyncio", "urllib3", "httpx", "filelock", "huggingface_hub", "transformers", "matplotlib")
"""Libraries whose news below a warning is not ours to tell."""


def fields(**values: Any) -> dict[str, Any]:
    """For `extra=`: what the event is about, apart from its name."""
    return {_FIELDS: values}


def set_up_logging(level: str, program: str) -> None:
    """The whole process logs to stderr from now on; `program` opens every line's source where a module has no name."""
    handler = logging.StreamHandler(sys.stderr)
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


class _LineFormatter(logging.Formatter):
    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        source = self._program if record.name in ("root", "__main__") else record.name
        parts = [f"{seconds}.{int(record.msecs):03d}Z {record.levelname.lower()} {source}:"]
        parts.append(_one_line(record.getMessage()))
        parts += [f"{name}={_quoted(value)}" for name, value in getattr(record, _FIELDS, {}).items()]
        if record.exc_info:
            parts.append(f"traceback={_quoted(self.formatException(record.exc_info))}")
        return " ".join(parts)


def _one_line(text: str) -> str:
    if text.isprintable():
        return text[:_MAX_VALUE_CHARACTERS]
    escaped = (character if character.isprintable() else repr(character)[1:-1] for character in text)
    return "".join(escaped)[:_MAX_VALUE_CHARACTERS]


def _quoted(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if text and not any(character in ' ="\\' or not character.isprintable() for character in text):
        return text[:_MAX_VALUE_CHARACTERS]
    return '"' + _one_line(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'
