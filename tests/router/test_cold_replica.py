"""A replica that says at once that it holds much less of a prompt than the router believes."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from aiohttp import web

from tests.router.conftest import Bench, BenchFactory, chat
from tests.router.fake_replica import answer, refuse

EXPECT = "x-warmroute-expect-cached-tokens"
LONG = chat(stream=False, text="the river and the sea " * 400)


async def ask(bench: Bench, body: dict[str, Any] = LONG) -> tuple[int, str]:
    async with bench.client.post(bench.url, json=body) as response:
        await response.read()
        return response.status, response.headers["x-warmroute-replica"]


async def cold_at_once(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
    """As a replica whose cache was reset: 412 where something is expected, an answer where nothing is."""
    if EXPECT in request.headers:
        return await refuse(412, **{"x-warmroute-cached-tokens": "0"})(request, body)
    return await answer(request, body)


async def test_the_request_is_placed_again_as_if_it_had_not_been_sent(bench: BenchFactory) -> None:
    made = await bench(policy="cache-aware", expect_cached=True, max_retries=0)
    _, warm_id = await ask(made)
    warm = made.replica_for(warm_id)
    assert EXPECT not in warm.seen[0].headers

    warm.behave = cold_at_once
    status, _ = await ask(made)
    assert status == 200
    other = next(replica for replica in made.replicas if replica is not warm)
    second, third = [*warm.seen, *other.seen][1:]
    assert int(second.headers[EXPECT]) > 1000
    assert EXPECT not in third.headers
    assert second.body == third.body
    assert made.router.health.usable(warm_id, time.monotonic())
    await made.settled()


async def test_one_request_is_refused_for_a_cold_cache_at_most_once(bench: BenchFactory) -> None:
    made = await bench(policy="cache-aware", expect_cached=True)
    for _ in range(4):
        await ask(made)
    before = made.seen
    for replica in made.replicas:
        replica.behave = cold_at_once
    assert (await ask(made))[0] == 200
    assert made.seen == before + 2
    await made.settled()


async def test_a_replica_that_holds_less_than_it_publishes_is_told_of_once_and_once_more_when_it_has_healed(
    bench: BenchFactory, caplog: pytest.LogCaptureFixture
) -> None:
    made = await bench(1)
    (replica,) = made.replicas
    with caplog.at_level(logging.INFO, "router.app"):
        for cached in [0] * 30 + [1000] * 100:
            made.router.placement.trust.observe(replica.id, 1000, cached, 16)
    told = [(record.levelname, record.getMessage(), record.fields["replica"]) for record in caplog.records]  # type: ignore[attr-defined]
    assert told == [
        ("WARNING", "a replica's cache holds less than it publishes: it counts for less", replica.id),
        ("INFO", "a replica's cache holds what it publishes again", replica.id),
    ]


async def test_unless_asked_to_the_router_expects_nothing_and_passes_a_412_on(bench: BenchFactory) -> None:
    made = await bench(policy="cache-aware")
    await ask(made)
    for replica in made.replicas:
        replica.behave = refuse(412, **{"x-warmroute-cached-tokens": "0"})
    assert (await ask(made))[0] == 412
    assert all(EXPECT not in seen.headers for replica in made.replicas for seen in replica.seen)


async def test_a_412_that_says_nothing_of_the_cache_is_the_clients(bench: BenchFactory) -> None:
    made = await bench(policy="cache-aware", expect_cached=True)
    await ask(made)
    for replica in made.replicas:
        replica.behave = refuse(412)
    assert (await ask(made))[0] == 412
    await made.settled()
