"""Redis is flushed, killed, late: the router keeps what it knew and comes back to the truth."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from router.block_index import BlockIndex
from router.fleet import Fleet
from router.follower import Follower
from shared.fleet_state import FleetState
from tests.fleet_members import Member
from tests.helpers import eventually
from tests.restartable_redis import restartable_redis
from tests.router.following import following


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


async def test_leases_that_ran_out_during_an_outage_empty_no_fleet() -> None:
    with restartable_redis() as server:
        async with following(server.url) as router:
            async with Member(server.url) as member:
                member.compute(range(40))
                await eventually(lambda: router.knows(member))
                await member.crash()  # so that nothing but the router comes back for now
                server.kill()
                await eventually(lambda: router.follower._away)
                server.restart()
                server.client.sadd("warmroute:{default}:replicas", "r1")  # restored from a dump, the lease long over
                await eventually(lambda: not router.follower._away)
                assert router.states() == {"r1": "accepting"}
                assert router.follower.view.step == "stale"
            async with Member(server.url) as again:
                again.compute(range(20))
                await eventually(lambda: router.knows(again) and router.follower.view.step == "exact")


async def test_a_flushed_redis_empties_no_fleet(redis_url: str, client: Any) -> None:
    async with following(redis_url) as router, Member(redis_url, "r1") as one, Member(redis_url, "r2") as two:
        one.compute(range(40))
        await eventually(lambda: router.knows(one, two))
        sizes: set[int] = set()
        router.fleet.subscribe(lambda: sizes.add(len(router.fleet)))
        client.flushall()
        await eventually(lambda: one.publisher.republished == two.publisher.republished == 2)
        await eventually(lambda: router.knows(one, two))
        assert sizes == set(), "nobody left, nobody joined"
        await eventually(lambda: router.follower.view.step == "exact")


async def test_while_redis_is_away_the_last_view_stays_and_is_called_stale(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "router.follower")
    with restartable_redis() as server:
        async with following(server.url) as router, Member(server.url) as member:
            member.compute(range(40))
            await eventually(lambda: router.knows(member))
            server.kill()
            member.compute(range(100, 140))
            await eventually(lambda: router.follower.view.step == "stale")
            age = router.follower.view.age_seconds
            assert age is not None
            assert age > 1
            assert router.states() == {"r1": "accepting"}
            assert router.index.held_prefixes(member.keys(range(40))) == {"r1": 10}
            server.restart()
            await eventually(lambda: router.follower.view.step == "exact")
            await eventually(lambda: router.knows(member))
            assert router.index.held_prefixes(member.keys(range(100, 140))) == {"r1": 10}
            # Before the member leaves, which the router may or may not hear of.
            assert [line.message.split(" (")[0] for line in caplog.records if line.name == "router.follower"] == [
                "replica 'r1' joined: tiny at http://r1:8000",
                "Redis is away",
                "Redis is back: reading on",
                "replica 'r1' is read again: epoch",
            ]


async def test_a_router_started_before_redis_joins_when_it_comes() -> None:
    with restartable_redis() as server:
        server.kill()
        async with following(server.url) as router, Member(server.url) as member:
            member.compute(range(40))
            await eventually(lambda: router.follower._away)
            assert router.follower.view == ("hash", None)
            server.restart()
            await eventually(lambda: router.knows(member) and router.follower.view.step == "exact")


async def test_very_old_views_are_not_used() -> None:
    now = [0.0]
    state = FleetState("redis://127.0.0.1:1", timeout_seconds=0.1)
    follower = Follower(state, Fleet(), BlockIndex(), clock=lambda: now[0])
    follower._current_at = 0.0
    steps = []
    for now[0] in (1.0, 3.0, 299.0, 301.0):
        steps.append(follower.view.step)
    assert steps == ["exact", "stale", "stale", "hash"]
    await state.close()


async def test_a_fault_of_ours_is_told_and_does_not_end_the_following(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(redis_url) as router, Member(redis_url) as member:
        member.compute(range(40))
        await eventually(lambda: router.knows(member))

        async def broken(*_: object) -> list[object]:
            monkeypatch.undo()
            raise RuntimeError("nobody has thought of this")

        monkeypatch.setattr(router.follower._fleet_state, "read_log", broken)
        await eventually(lambda: "nobody has thought of this" in caplog.text)
        member.compute(range(80))
        await eventually(lambda: router.knows(member) and router.follower.view.step == "exact")
    assert router.follower.reread["fault"] == 1
