"""Routers tell each other of their work through a real Redis, and get over its loss."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from router.ledger import Dispatch, Ledger
from router.shared_work import Journal, OthersWork
from router.work_exchange import WorkExchange
from shared.fleet_state import FleetState
from tests.helpers import eventually
from tests.restartable_redis import RestartableRedis, restartable_redis


@pytest.fixture
def server() -> Iterator[RestartableRedis]:
    with restartable_redis() as server:
        yield server


class Desk:
    def __init__(self, name: str) -> None:
        self.ledger = Ledger()
        self.journal = Journal(name)
        self.others = OthersWork(self.ledger, {"r0"}.__contains__)

    def send(self) -> Dispatch:
        dispatch = self.ledger.dispatch("r0", 0.0, service_seconds=1.0, uncached_tokens=100)
        self.journal.dispatched(dispatch)
        return dispatch

    def end(self, dispatch: Dispatch) -> None:
        self.ledger.release(dispatch, 1.0)
        self.journal.ended(dispatch)


@asynccontextmanager
async def exchanging(url: str, name: str, secret: str = "") -> AsyncIterator[Desk]:
    async with AsyncExitStack() as stack:
        state = FleetState(url, secret=secret, timeout_seconds=1.0)
        stack.push_async_callback(state.close)
        desk = Desk(name)
        exchange = WorkExchange(state, desk.journal, desk.others)
        exchange.start()
        stack.push_async_callback(exchange.stop)
        yield desk


async def test_each_router_sees_what_the_other_has_under_way_until_it_ends(server: RestartableRedis) -> None:
    async with exchanging(server.url, "a") as here:
        before = here.send()
        async with exchanging(server.url, "b") as there:
            await eventually(lambda: there.ledger.active("r0") == 1, what="what was under way before they met")
            ours = there.send()
            await eventually(lambda: here.ledger.active("r0") == 2)
            there.end(ours)
            here.end(before)
            await eventually(lambda: here.ledger.active("r0") == there.ledger.active("r0") == 0)
            here.ledger.check_integrity()
            there.ledger.check_integrity()


async def test_they_find_each_other_again_when_redis_comes_back_empty(server: RestartableRedis) -> None:
    async with exchanging(server.url, "a") as here, exchanging(server.url, "b") as there:
        first = here.send()
        await eventually(lambda: there.ledger.active("r0") == 1)
        server.kill()
        here.end(first)
        kept = here.send()
        server.restart()
        await eventually(lambda: len(there.others) == 1 and len(here.others) == 1)
        await eventually(lambda: there.ledger.active("r0") == 1, what="only what is still under way")
        here.end(kept)
        await eventually(lambda: there.ledger.active("r0") == 0)


async def test_a_stream_that_was_flushed_or_filled_with_rubbish_stops_nobody(server: RestartableRedis) -> None:
    work = "warmroute:{default}:work"
    async with exchanging(server.url, "a") as here, exchanging(server.url, "b") as there:
        await eventually(lambda: len(here.others) == 1 and len(there.others) == 1)
        server.client.flushall()
        server.client.xadd(work, {"router": "c", "batch": b"\xc1"})
        server.client.xadd(work, {b"\xff": b"\xff"})
        dispatch = here.send()
        await eventually(lambda: there.ledger.active("r0") == 1)
        server.client.delete(work)
        server.client.set(work, "not a stream")
        here.end(dispatch)
        server.client.delete(work)
        await eventually(lambda: there.ledger.active("r0") == 0)


async def test_routers_of_another_secret_are_not_believed(server: RestartableRedis) -> None:
    async with (
        exchanging(server.url, "a", "one") as here,
        exchanging(server.url, "b", "one") as there,
        exchanging(server.url, "c", "other") as stranger,
    ):
        stranger.send()
        here.send()
        await eventually(lambda: there.ledger.active("r0") == 1)
        assert len(there.others) == 1, "the stranger was heard before, and passed over"
        assert stranger.ledger.active("r0") == 1


async def test_a_fault_of_ours_is_told_and_does_not_end_the_exchange(
    server: RestartableRedis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with exchanging(server.url, "a") as a, exchanging(server.url, "b") as b:
        await eventually(lambda: bool(a.others) and bool(b.others), what="they know each other")

        def broken(*_: object) -> None:
            monkeypatch.undo()
            raise RuntimeError("nobody has thought of this")

        monkeypatch.setattr(a.journal, "take", broken)
        a.send()
        await eventually(lambda: "nobody has thought of this" in caplog.text)
        await eventually(lambda: b.ledger.total_active == 1, what="told again")
