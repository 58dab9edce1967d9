"""Plays a plan with Locust, in a process of its own: what gevent does to the standard library stays there."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from loadtest.plans import AnyPlan, write_plan
from loadtest.records import RequestRecord, read_records, unsent
from loadtest.workloads import Session

__all__ = ["LoadGeneratorError", "play"]

_LOCUSTFILE = Path(__file__).with_name("locustfile.py")
_POLL_SECONDS = 0.1
_START_SECONDS = 30.0
_STOP_SECONDS = 5.0
_LOG_CHARACTERS = 2000


class LoadGeneratorError(Exception):
    """Locust did not do its job; the message has the end of its log."""


def play(
    plan: AnyPlan,
    *,
    host: str,
    model: str,
    folder: Path,
    timeout_seconds: float,
    on_progress: Callable[[int], None],
) -> list[RequestRecord]:
    """One record for every request of the plan, in the order sent. `on_progress` gets how many are done so far.

    Leaves `plan.json`, `records.jsonl` and `locust.log` in `folder`. It ends when the last answer is there or its time
    is up: what has no record by then has failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_plan(folder / "plan.json", plan)
    records, log = folder / "records.jsonl", folder / "locust.log"
    records.write_bytes(b"")
    command = [sys.executable, "-m", "locust", "-f", str(_LOCUSTFILE), "--headless", "--users", "1", "--host", host]
    command += ["--plan", str(folder / "plan.json"), "--records", str(records), "--model", model]
    command += ["--request-timeout", str(timeout_seconds), "--only-summary", "--loglevel", "WARNING"]
    sessions = plan.schedule()
    deadline = time.monotonic() + _START_SECONDS + max(_longest_seconds(each, timeout_seconds) for each in sessions)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)  # noqa: S603 (ours)
        try:
            while process.poll() is None and time.monotonic() < deadline:
                on_progress(records.read_bytes().count(b"\n"))
                time.sleep(_POLL_SECONDS)
        finally:
            _end(process)
    found = read_records(records)
    on_progress(len(found))
    if not found:
        tail = log.read_text(errors="replace")[-_LOG_CHARACTERS:].strip()
        raise LoadGeneratorError(f"the load generator sent nothing; the end of {log}:\n{tail}")
    answered = {(record.session, record.turn) for record in found}
    lost = [
        unsent(session.id, k, turn.at_seconds, "The run ended before this request did.")
        for session in sessions
        for k, turn in enumerate(session.turns)
        if (session.id, k) not in answered
    ]
    return found + lost


def _longest_seconds(session: Session, timeout_seconds: float) -> float:
    """Until its last answer must be there, if every answer that a turn waits for takes all the time it is allowed."""
    seconds = 0.0
    for turn in session.turns:
        seconds = timeout_seconds + (turn.at_seconds if turn.think_seconds is None else seconds + turn.think_seconds)
    return seconds


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
