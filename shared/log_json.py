"""Log lines as JSON objects, for collectors that want no parser of their own.

{"time":"2026-01-31T12:00:00.123Z","level":"info","source":"router.follower","event":"replica joined","id":"r1"}
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import msgspec

__all__ = ["JsonFormatter"]

_encode = msgspec.json.Encoder().encode


class JsonFormatter(logging.Formatter):
    """`time_of` and `fields_of` a record; strings are cut after `longest` characters."""

    def __init__(
        self,
        program: str,
        time_of: Callable[[logging.LogRecord], str],
        fields_of: Callable[[logging.LogRecord], dict[str, Any]],
        longest: int,
    ) -> None:
        super().__init__()
        self._program = program
        self._time_of = time_of
        self._fields_of = fields_of
        self._longest = longest

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self._time_of(record),
            "level": record.levelname.lower(),
            "source": self._program if record.name in ("root", "__main__") else record.name,
            "event": self._sane(record.getMessage()),
        }
        for name, value in self._fields_of(record).items():
            line.setdefault(name, self._sane(value))
        if record.exc_info:
            line["traceback"] = self._sane(self.formatException(record.exc_info))
        text = _encode(line).decode()
        if text.isprintable():
            return text
        # Some readers take more than a line feed for the end of a line, and terminals obey what they should show.
        return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)

    def _sane(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        # Half of a surrogate pair, as in a file's name that is not UTF-8, has no place in JSON.
        return str(value)[: self._longest].encode(errors="backslashreplace").decode()
