"""What one request did, as the load generator saw it: one JSON line each."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import msgspec

__all__ = ["RequestRecord", "append_record", "read_records", "unsent"]


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds count from the start of the run. All latencies count from the scheduled arrival."""

    session: int
    turn: int
    scheduled_seconds: float
    sent_seconds: float
    lag_ms: float
    """How late the generator was: sent, less the later of the schedule and the answer the turn had to wait for."""
    error: str | None = None
    status: int = 0
    ttft_ms: float | None = None
    e2e_ms: float | None = None
    tpot_ms: float | None = None
    """Mean time between output tokens; None when there were fewer than two."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    predicted_tokens: int | None = None
    """The cached tokens that the router expected."""
    replica: str = ""
    answer: str = ""


def unsent(session: int, turn: int, scheduled_seconds: float, error: str) -> RequestRecord:
    """A scheduled turn that could not be asked. It counts as failed: the one before it has not been answered."""
    return RequestRecord(
        session=session,
        turn=turn,
        scheduled_seconds=scheduled_seconds,
        sent_seconds=scheduled_seconds,
        lag_ms=0.0,
        error=error,
    )


def append_record(file: IO[bytes], record: RequestRecord) -> None:
    """Whole lines only, at once, so that whoever follows the file never sees half of one."""
    file.write(msgspec.json.encode(record) + b"\n")
    file.flush()


def read_records(path: Path) -> list[RequestRecord]:
    """All records of a run, in the order they were sent. A last line that is cut off is not there."""
    decode = msgspec.json.Decoder(RequestRecord).decode
    records = [decode(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return sorted(records, key=lambda record: (record.sent_seconds, record.session, record.turn))
