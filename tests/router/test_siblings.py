"""Workers ask each other, and nobody waits long for one that is not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from router import siblings
from router.metrics import exposition
from router.siblings import Siblings
from router.worker_metrics import merged, packed


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[list[Siblings]]:
    async with AsyncExitStack() as stack:
        workers = [Siblings(tmp_path, number, 3) for number in range(3)]
        for worker in workers:
            worker.register("double", lambda text, own=worker.number: text * 2 + b"%d" % own)  # type: ignore[misc]
            await worker.start()
            stack.push_async_callback(worker.stop)
        yield workers


async def test_all_others_answer_by_number(three: list[Siblings]) -> None:
    assert await three[1].ask("double", b"ab") == {0: b"abab0", 2: b"abab2"}


async def test_who_is_not_there_is_left_out(tmp_path: Path, three: list[Siblings]) -> None:
    (tmp_path / "0").unlink()
    assert await three[1].ask("double", b"x") == {2: b"xx2"}


async def test_who_does_not_answer_is_left_out(
    tmp_path: Path, three: list[Siblings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "_PATIENCE_SECONDS", 0.1)
    held: list[asyncio.StreamWriter] = []
    (tmp_path / "0").unlink()
    server = await asyncio.start_unix_server(lambda _, writer: held.append(writer), tmp_path / "0")
    assert await three[1].ask("double", b"x") == {2: b"xx2"}
    server.close()
    for writer in held:
        writer.close()


async def test_one_that_was_started_again_takes_the_place_of_the_one_before(
    tmp_path: Path, three: list[Siblings]
) -> None:
    again = Siblings(tmp_path, 0, 3)
    again.register("double", lambda text: b"again")
    await again.start()
    assert (await three[1].ask("double"))[0] == b"again"
    await again.stop()


def test_series_of_several_workers_stand_under_one_family_each_with_its_worker() -> None:
    requests = CounterMetricFamily("requests", "Requests", labels=["path"])
    requests.add_metric(["/a"], 3)
    up = GaugeMetricFamily("up", "Up", value=True)
    text = exposition(merged({1: packed([requests]), 0: packed([requests, up])})).decode()
    assert text == (
        "# HELP requests_total Requests\n"
        "# TYPE requests_total counter\n"
        'requests_total{path="/a",worker="0"} 3.0\n'
        'requests_total{path="/a",worker="1"} 3.0\n'
        "# HELP up Up\n"
        "# TYPE up gauge\n"
        'up{worker="0"} 1.0\n'
    )
