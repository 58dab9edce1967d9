"""Somebody else writes under a key that all share: it is told, everybody serves on, and deleting it is all it takes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from shared.fleet_calls import MistypedKeys
from tests.fleet_members import Member
from tests.helpers import eventually
from tests.router.following import following
from tests.router.test_work_exchange import exchanging

PREFIX = "warmroute:{default}:"


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def overwrite(client: Any, key: str) -> None:
    with client.pipeline(transaction=True) as pipe:
        pipe.delete(PREFIX + key)
        pipe.hset(PREFIX + key, "not", "ours")
        pipe.execute()


def told(caplog: pytest.LogCaptureFixture, key: str) -> int:
    return sum(
        repr(PREFIX + key) in record.getMessage() and "DEL it" in record.getMessage() for record in caplog.records
    )


async def test_the_list_of_replicas(redis_url: str, client: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with following(redis_url) as router, Member(redis_url) as member:
        member.compute(range(40))
        await eventually(lambda: router.knows(member))
        overwrite(client, "replicas")
        await eventually(lambda: told(caplog, "replicas") == 2, what="told by router and replica")
        member.compute(range(100, 140))
        await eventually(lambda: router.knows(member), what="what is computed now")
        assert (router.follower.view.step, router.states()) == ("exact", {"r1": "accepting"})
        assert (member.publisher.current, member.publisher.republished) == (True, 1)
        client.delete(PREFIX + "replicas")
        async with Member(redis_url, "r2") as newcomer:
            await eventually(lambda: router.knows(newcomer), what="a replica that joins afterwards")
            await eventually(lambda: client.scard(PREFIX + "replicas") == 2)
    assert "Redis is away" not in caplog.text
    assert told(caplog, "replicas") == 2


async def test_routers_work(redis_url: str, client: Any, caplog: pytest.LogCaptureFixture) -> None:
    overwrite(client, "work")
    async with exchanging(redis_url, "a") as here, exchanging(redis_url, "b") as there:
        await eventually(lambda: told(caplog, "work") == 2, what="told by both")
        here.send()
        client.delete(PREFIX + "work")
        await eventually(lambda: there.ledger.active("r0") == 1, what="they tell each other again")
    assert told(caplog, "work") == 2


async def test_a_tokenizer_is_mended_by_any_replica_that_uses_it(redis_url: str, client: Any) -> None:
    async with Member(redis_url) as member:
        key = f"tokenizer:{member.record.tokenizer}"
        await eventually(lambda: client.type(PREFIX + key) == b"string")
        overwrite(client, key)
        await eventually(lambda: client.type(PREFIX + key) == b"string", what="the tokenizer is back")
        async with following(redis_url) as router:
            await eventually(lambda: router.fleet.encoder(member.record.tokenizer) is not None)


def test_it_is_told_once_a_minute_for_each_key(caplog: pytest.LogCaptureFixture) -> None:
    times = iter((0.0, 0.0, 1.0, 1.0, 59.0, 59.0, 61.0, 61.0))
    mistyped = MistypedKeys(lambda: next(times))
    with caplog.at_level(logging.ERROR):
        for _ in range(4):
            mistyped.tell("a")
            mistyped.tell("b")
    assert [record.getMessage().count("'a'") for record in caplog.records] == [1, 0, 1, 0]
