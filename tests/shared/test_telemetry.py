"""One line per event, whatever is in it."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from shared.telemetry import _MOST_LINES, _BatchingHandler, _LineFormatter, fields, set_up_logging, tell
from tests.helpers import wait_until


class _Stderr(io.StringIO):
    """Asked what was written, it first has everything written."""

    def getvalue(self) -> str:
        for handler in logging.getLogger().handlers:
            handler.flush()
        return super().getvalue()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    stderr = _Stderr()
    monkeypatch.setattr(sys, "stderr", stderr)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    set_up_logging("info", "warmroute test")
    yield stderr
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def test_an_event_is_one_line_with_its_fields(lines: io.StringIO) -> None:
    logging.getLogger("router.follower").info("replica joined", extra=fields(id="r 1", blocks=8, age=0.25, empty=""))
    expected = (
        r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info router\.follower: replica joined id="r 1" blocks=8 age=0.25'
    )
    assert re.fullmatch(expected + ' empty=""\n', lines.getvalue())


def test_what_is_told_often_is_told_the_same(lines: io.StringIO, caplog: pytest.LogCaptureFixture) -> None:
    values = {"id": "r 1", "blocks": 8, "age": 0.25, "whole": True, "empty": "", "none": None, "said": 'x="\n'}
    log = logging.getLogger("router.follower")
    log.info("replica joined", extra=fields(**values))
    tell(log, "replica joined", values)
    one, two = (line.partition(" info ")[2] for line in lines.getvalue().splitlines())
    assert one == two
    logging.getLogger().addHandler(caplog.handler)
    tell(log, "to any handler", {})
    assert "to any handler" in caplog.text
    log.setLevel(logging.WARNING)
    tell(log, "not asked for", {})
    log.setLevel(logging.NOTSET)
    assert "not asked for" not in lines.getvalue()


def test_no_value_can_forge_a_second_line(lines: io.StringIO) -> None:
    logging.getLogger("x").info("got %s", "a\nb", extra=fields(header='x"\r\n2026-01-01 info x: forged\u2028\x1b[31m'))
    assert len(lines.getvalue().splitlines()) == 1
    assert "\x1b" not in lines.getvalue()


def test_a_traceback_stays_on_the_line_of_its_event(lines: io.StringIO) -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logging.getLogger("x").exception("failed")
    assert len(lines.getvalue().splitlines()) == 1
    assert "ValueError: first" in lines.getvalue()


def test_endless_values_are_cut(lines: io.StringIO) -> None:
    logging.getLogger("x").info("m" * 10**5, extra=fields(value="v" * 10**5))
    assert len(lines.getvalue()) < 10_000


def test_what_is_below_the_level_or_a_librarys_small_talk_is_not_told(lines: io.StringIO) -> None:
    logging.getLogger("x").debug("no")
    logging.getLogger("aiohttp.access").info("no")
    assert lines.getvalue() == ""


async def test_what_a_client_sends_that_is_not_http_is_no_error_and_is_not_told(lines: io.StringIO) -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response()

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer hunter2\0\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
    finally:
        await runner.cleanup()
    assert "info aiohttp.server: a client sent what is not HTTP" in lines.getvalue()
    assert "hunter2" not in lines.getvalue()
    assert "Traceback" not in lines.getvalue()


def test_news_is_written_soon_and_a_warning_at_once_behind_it() -> None:
    stderr = io.StringIO()
    handler = _BatchingHandler(stderr)
    log = logging.Logger("batch")
    log.addHandler(handler)
    log.info("one")
    log.info("two")
    wait_until(lambda: stderr.getvalue() == "one\ntwo\n", what="the news written")
    log.info("three")
    log.warning("four")
    wait_until(lambda: stderr.getvalue() == "one\ntwo\nthree\nfour\n", what="the warning written")


def test_who_logs_never_waits_for_the_reader_and_what_was_dropped_is_counted() -> None:
    reading, writing = os.pipe()
    said = 3 * _MOST_LINES
    with os.fdopen(reading, encoding="utf-8") as read, os.fdopen(writing, "w", encoding="utf-8") as stream:
        handler = _BatchingHandler(stream)
        handler.setFormatter(_LineFormatter("test"))
        log = logging.Logger("batch")
        log.addHandler(handler)
        for number in range(said):
            log.info("%099d", number)  # nobody reads yet: the pipe is full after some hundred
        written: list[str] = []
        until_last = itertools.takewhile(lambda line: not line.endswith(" info batch: last\n"), iter(read.readline, ""))
        reader = threading.Thread(target=lambda: written.extend(until_last))
        reader.start()
        wait_until(lambda: not handler._lines, what="the waiting lines written")
        log.info("last")
        reader.join()
    (told,) = (line for line in written if "lines could not be written" in line)
    kept = [line for line in written if line != told]
    assert [line.partition(" info batch: ")[2] for line in kept] == [f"{number:099d}\n" for number in range(len(kept))]
    assert told.endswith(f" warning log: lines could not be written lines={said - len(kept)}\n")
    assert _MOST_LINES <= len(kept) < said


def test_lines_of_several_processes_in_one_pipe_are_not_mixed() -> None:
    program = (
        "import logging, shared.telemetry as t; t.set_up_logging('info', 'x')\n"
        "for number in range(3000): logging.info('%04d' % number + 'x' * 96)"
    )
    read, write = os.pipe()
    writers = [subprocess.Popen([sys.executable, "-c", program], stderr=write) for _ in range(3)]
    os.close(write)
    with os.fdopen(read) as pipe:
        said = [line.partition(" info x: ")[2] for line in pipe]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert sorted(said) == sorted(f"{number:04d}{'x' * 96}\n" for number in range(3000) for _ in writers)


@pytest.fixture
def json_lines(monkeypatch: pytest.MonkeyPatch, lines: _Stderr) -> Callable[[], list[dict[str, Any]]]:
    """Lines so far, each a JSON object of its own."""
    set_up_logging("info", "warmroute test", "json")
    return lambda: [json.loads(line) for line in lines.getvalue().splitlines()]


def test_as_json_an_event_is_one_object_with_its_fields(json_lines: Callable[[], list[dict[str, Any]]]) -> None:
    about = fields(id="r 1", blocks=8, age=0.25, known=None, path=Path("/x"), level="forged", endless=float("inf"))
    logging.getLogger("router.follower").info("replica %s", "joined", extra=about)
    (line,) = json_lines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "info",
        "source": "router.follower",
        "event": "replica joined",
        "id": "r 1",
        "blocks": 8,
        "age": 0.25,
        "known": None,
        "path": "/x",
        "endless": None,
    }


def test_as_json_nothing_breaks_a_line_or_makes_it_endless(json_lines: Callable[[], list[dict[str, Any]]]) -> None:
    log = logging.getLogger("x")
    log.info("a\nb\u2028", extra=fields(value="v" * 10**5, broken="\ud800"))
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        log.exception("failed")
    told, failed = json_lines()
    assert (told["event"], len(told["value"]), told["broken"]) == ("a\nb\u2028", 2000, "\\ud800")
    assert failed["traceback"].endswith("ValueError: first\nsecond")


def test_what_a_program_said_last_is_written_when_it_ends() -> None:
    program = "import logging, shared.telemetry as t; t.set_up_logging('info', 'x'); logging.info('last words')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr.endswith("last words\n")
