"""The decision log: what stands in it, what never does, how large it may become, and what a full disk does to it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from router import decision_log
from router.decision_log import DecisionLine, DecisionLog, DroppedLine, FirstTokenLine, older
from router.placement import Decision
from router.policies.base import Candidate, Request
from shared.blocks import PublishedKey, unpack_keys
from tests.helpers import wait_until
from tests.router.conftest import BenchFactory, chat
from tests.router.fake_replica import refuse

Line = DecisionLine | FirstTokenLine | DroppedLine
CANDIDATES = [Candidate(f"r{n}", 1, 16, 16, 1.0, 0.0, 0.1, 0.0, 0.1 + n, n) for n in range(3)]
DECISION = Decision("cache-aware", "exact", "warm", CANDIDATES[0], CANDIDATES, 40)
REQUEST = Request(40, [PublishedKey(1 << 63), PublishedKey(2)], 16, b"affinity", b"session")
decode = msgspec.json.Decoder(Line).decode


def lines(path: Path) -> list[Line]:
    return [decode(line) for line in path.read_bytes().splitlines()]


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., DecisionLog]:
    return lambda max_bytes=1 << 20: DecisionLog(tmp_path / "log", max_bytes)


def test_a_decision_comes_back_as_it_was_made(opened: Callable[..., DecisionLog], tmp_path: Path) -> None:
    log = opened()
    logged = log.decided("some-id", 2, REQUEST, DECISION, now=10.0)
    logged.first_token(10.25, 32)
    log.close()
    decided, answered = lines(tmp_path / "log")
    assert isinstance(decided, DecisionLine)
    assert (decided.id, decided.attempt, decided.policy, decided.view) == ("some-id", 2, "cache-aware", "exact")
    assert (decided.chosen, decided.reason, decided.candidates) == ("r0", "warm", CANDIDATES)
    assert (decided.prompt_tokens, decided.block_size, decided.streamed) == (40, 16, True)
    assert (unpack_keys(decided.keys), decided.affinity, decided.session) == (REQUEST.keys, b"affinity", b"session")
    assert answered == FirstTokenLine(decided.number, 0.25, 32)


def test_a_file_that_is_full_becomes_the_older_one(opened: Callable[..., DecisionLog], tmp_path: Path) -> None:
    path = tmp_path / "log"
    for number in range(40):  # each closing writes a batch of its own
        log = opened(max_bytes=4096)
        log.decided(str(number), 1, REQUEST, DECISION, 0.0)
        log.close()
    assert path.stat().st_size <= 4096
    assert older(path).stat().st_size <= 4096
    kept = [line.id for file in (older(path), path) for line in lines(file) if isinstance(line, DecisionLine)]
    assert 4 < len(kept) < 40
    assert kept == [str(number) for number in range(40 - len(kept), 40)], "the newest, in order"


def test_half_a_line_of_a_killed_router_ends_where_the_next_one_begins(
    opened: Callable[..., DecisionLog], tmp_path: Path
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"type":"decision","num')
    log = opened()
    log.decided("whole", 1, REQUEST, DECISION, 0.0)
    log.close()
    torn, whole = path.read_bytes().splitlines()
    assert torn == b'{"type":"decision","num'
    assert decode(whole).id == "whole"  # type: ignore[union-attr]


def test_lines_that_a_full_disk_refused_are_told_of_once_there_is_room(
    opened: Callable[..., DecisionLog],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = opened()
    file = log._file

    class Full:
        def write(self, text: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(log, "_file", Full())
    for number in range(3):
        log.decided(str(number), 1, REQUEST, DECISION, 0.0)
        wait_until(lambda number=number: log._lost == number + 1, what="the line is lost")  # type: ignore[misc]
    monkeypatch.setattr(log, "_file", file)
    log.decided("after", 1, REQUEST, DECISION, 0.0)
    log.close()
    dropped, after = [decode(line) for line in (tmp_path / "log").read_bytes().splitlines() if line]
    assert dropped == DroppedLine(3)
    assert after.id == "after"  # type: ignore[union-attr]
    assert [record.getMessage() for record in caplog.records] == ["decisions cannot be logged"], "once, not each time"


def test_what_waits_for_the_disk_is_bounded(
    opened: Callable[..., DecisionLog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log, "_MOST_WAITING", 30)
    log = opened()
    for number in range(500):
        log.decided(str(number), 1, REQUEST, DECISION, 0.0)
    assert sum(news.weight for news in list(log._waiting)) <= 30
    log.close()
    told = lines(tmp_path / "log")
    dropped = sum(line.lines for line in told if isinstance(line, DroppedLine))
    decisions = [line for line in told if isinstance(line, DecisionLine)]
    assert dropped > 400
    assert dropped + len(decisions) == 500


async def test_a_request_leaves_its_decision_and_its_first_token_but_no_word_of_it(
    bench: BenchFactory, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    b = await bench(2, decision_log=str(path))
    body = chat(text="a most secret sentence " * 50, prompt_cache_key="alice-and-bob")
    async with b.client.post(b.url, json=body) as response:
        await response.read()
        request_id = response.headers["x-request-id"]
    async with b.client.post(b.router.url + "/v1/embeddings", json={"model": "fake"}) as passed:
        await passed.read()
    await b.settled()
    wait_until(lambda: path.read_bytes().count(b"\n") >= 2, what="both lines are written")
    decided, answered = lines(path)
    assert isinstance(decided, DecisionLine)
    assert isinstance(answered, FirstTokenLine)
    assert (decided.id, decided.attempt, decided.policy) == (request_id, 1, "round-robin")
    assert {candidate.replica_id for candidate in decided.candidates} == {replica.id for replica in b.replicas}
    assert decided.keys
    assert (answered.number, answered.cached_tokens) == (decided.number, 7)
    assert 0 < answered.seconds < 10
    for word in (b"secret", b"alice"):
        assert word not in path.read_bytes()


async def test_an_attempt_that_failed_stands_there_without_a_first_token(bench: BenchFactory, tmp_path: Path) -> None:
    path = tmp_path / "log"
    b = await bench(2, decision_log=str(path))
    broken = min(replica.id for replica in b.replicas)
    b.replica_for(broken).behave = refuse(503)
    async with b.client.post(b.url, json=chat()) as response:
        assert response.status == 200
        await response.read()
    wait_until(lambda: path.read_bytes().count(b"\n") >= 3, what="both attempts are written")
    first, second, answered = lines(path)
    assert isinstance(first, DecisionLine)
    assert isinstance(second, DecisionLine)
    assert (first.attempt, first.chosen, second.attempt) == (1, broken, 2)
    assert [candidate.replica_id for candidate in second.candidates] != [broken]
    assert isinstance(answered, FirstTokenLine)
    assert answered.number == second.number


def test_a_file_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "log"):
        done = subprocess.run(
            [sys.executable, "-m", "warmroute", "router", "--redis=none", "--port=0", f"--decision-log={path}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert f"warmroute router: --decision-log {path} cannot be written (" in done.stderr.splitlines()[-1]
