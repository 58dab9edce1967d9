"""The router over real replicas with the simulated engine, joined through a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from replica.server import ReplicaServer
from router.app import Router
from shared.settings import ReplicaSettings, RouterSettings
from tests.helpers import eventually
from tests.restartable_redis import restartable_redis
from tests.router.conftest import Bench
from tests.router.fake_replica import FakeReplica


class LiveFleet:
    def __init__(self, stack: AsyncExitStack, redis_url: str) -> None:
        self._stack = stack
        self.redis_url = redis_url
        self.replicas: dict[str, ReplicaServer] = {}

    async def replica(self, replica_id: str, **settings: Any) -> ReplicaServer:
        given: dict[str, Any] = {"engine": "sim", "port": 0, "blocks": 1024, "sim_base_seconds": 0.001}
        server = ReplicaServer(ReplicaSettings(id=replica_id, redis=self.redis_url, **(given | settings)))
        await server.listen()
        self.replicas[replica_id] = server
        await server.load()
        return server

    async def stop(self) -> None:
        await asyncio.gather(*(server.stop(0) for server in self.replicas.values()))

    async def router(self, **settings: Any) -> Bench:
        given: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "redis": self.redis_url}
        router = await self._stack.enter_async_context(Router(RouterSettings(**(given | settings))))
        client = await self._stack.enter_async_context(aiohttp.ClientSession())
        await eventually(lambda: len(router.fleet) == len(self.replicas), what="fleet known")
        await eventually(lambda: router.view.step == "exact", what="exact view")
        if self.replicas:
            await eventually(lambda: router.fleet.namespaces("tiny")[0].encoder, what="tokenizer fetched")
        no_fakes: list[FakeReplica] = []
        return Bench(router, no_fakes, client)


@pytest.fixture
async def live(redis_url: str) -> AsyncIterator[LiveFleet]:
    async with AsyncExitStack() as stack:
        fleet = LiveFleet(stack, redis_url)
        stack.push_async_callback(fleet.stop)
        yield fleet


async def say(client: aiohttp.ClientSession, url: str, *turns: str, stream: bool = False) -> aiohttp.ClientResponse:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4, "stream": stream}
    async with client.post(url + "/v1/chat/completions", json=body) as response:
        await response.read()
        assert response.status == 200, await response.text()
        return response


def headers(response: aiohttp.ClientResponse) -> tuple[str, int, int]:
    """Replica, predicted and cached tokens."""
    said = response.headers
    return (
        said["x-warmroute-replica"],
        int(said["x-warmroute-predicted-tokens"]),
        int(said["x-warmroute-cached-tokens"]),
    )


def story(name: str) -> str:
    return f"{name}: " + " ".join(f"{name}{number} went on" for number in range(120))


@pytest.mark.parametrize("stream", [True, False])
async def test_two_replicas_warmed_with_different_prefixes_are_found_by_content(live: LiveFleet, stream: bool) -> None:
    one, two = await live.replica("one"), await live.replica("two")
    b = await live.router()
    await say(b.client, one.url, story("apple"))
    await say(b.client, two.url, story("pear"))
    await eventually(lambda: all(b.router.index.held(name).device.blocks > 10 for name in ("one", "two")))
    for _ in range(3):
        for name, text in (("one", "apple"), ("two", "pear")):
            replica, predicted, cached = headers(
                await say(b.client, b.router.url, story(text), "ok", "and then?", stream=stream)
            )
            assert replica == name
            assert predicted > 200
            assert cached >= predicted - 16
    await b.settled()


async def test_a_conversation_stays_with_its_replica_and_the_engine_confirms_the_prediction(live: LiveFleet) -> None:
    for name in ("one", "two", "three"):
        await live.replica(name)
    b = await live.router()
    for person in ("ann", "bob", "eve", "dan"):
        turns = [story(person)]
        home, predicted, cached = headers(await say(b.client, b.router.url, *turns))
        for turn in range(3):
            blocks = b.router.index.held(home).device.blocks
            await eventually(lambda blocks=blocks: b.router.index.held(home).device.blocks >= blocks)  # type: ignore[misc]  # noqa: B023
            before = cached
            turns += ["I see.", f"question {turn} " * 20]
            replica, predicted, cached = headers(await say(b.client, b.router.url, *turns))
            assert replica == home
            assert cached > before
            assert predicted <= cached
    assert all(b.router.placement.trust.factor(name) == 1.0 for name in live.replicas)


async def test_what_moved_to_host_memory_is_predicted_brought_back_and_its_price_learned(live: LiveFleet) -> None:
    await live.replica("one", blocks=64, host_blocks=512)
    b = await live.router()
    for person in ("ann", "bob", "eve", "dan"):
        _, _, cached = headers(await say(b.client, b.router.url, story(person)))
        assert cached < 100
    await eventually(lambda: b.router.index.held("one").host.blocks > 30, what="blocks moved to host memory")
    _, predicted, cached = headers(await say(b.client, b.router.url, story("ann")))
    assert predicted > 300
    assert predicted <= cached
    replica = b.router.fleet.get("one")
    assert replica is not None
    await eventually(lambda: replica.onload_seconds_per_token, what="the way back was measured and published")
    assert replica.onload_seconds_per_token == pytest.approx(5e-6, rel=0.01), "what the simulated engine takes"


async def test_round_robin_is_blind_to_all_that(live: LiveFleet) -> None:
    await live.replica("one")
    await live.replica("two")
    b = await live.router(policy="round-robin")
    used = [headers(await say(b.client, b.router.url, story("same")))[0] for _ in range(4)]
    assert used == ["one", "two", "one", "two"]


async def test_a_burst_with_one_cold_prefix_is_kept_together_by_promises(live: LiveFleet) -> None:
    for name in ("one", "two", "three"):
        await live.replica(name, sim_per_token_seconds=1e-3)
    b = await live.router()
    answers = await asyncio.gather(*(say(b.client, b.router.url, story("burst"), stream=True) for _ in range(6)))
    used = {headers(answer)[0] for answer in answers}
    reasons = {answer.headers["x-warmroute-reason"] for answer in answers}
    assert len(used) == 1
    assert "promised" in reasons
    await b.settled()


async def test_the_dry_run_shows_every_candidate_and_changes_nothing(live: LiveFleet) -> None:
    await live.replica("one")
    two = await live.replica("two")
    b = await live.router()
    await say(b.client, two.url, story("dry"))
    await eventually(lambda: b.router.index.held("two").device.blocks > 10)
    body = {"model": "tiny", "messages": [{"role": "user", "content": story("dry")}]}
    async with b.client.post(b.router.url + "/route", json=body) as response:
        decision = await response.json()
    assert decision["chosen"]["replica_id"] == "two"
    assert decision["chosen"]["matched_tokens"] > 200
    assert {candidate["replica_id"] for candidate in decision["candidates"]} == {"one", "two"}
    assert decision["sentence"].startswith("two by cache-aware (warm)")
    async with b.client.post(
        b.router.url + "/route", json={"path": "/v1/completions", "model": "tiny", "prompt": "x"}
    ) as response:
        assert (await response.json())["prompt_tokens"] >= 1
    async with b.client.post(b.router.url + "/route", json={"path": "/nowhere"}) as response:
        assert response.status == 400
    await b.settled()


async def test_the_fleet_page_tells_what_the_router_knows(live: LiveFleet) -> None:
    await live.replica("one")
    b = await live.router()
    await say(b.client, b.router.url, story("fleet"))
    await eventually(lambda: b.router.index.held("one").device.blocks > 10)
    async with b.client.get(b.router.url + "/replicas") as response:
        listed = (await response.json())["replicas"]
    assert [(replica["id"], replica["state"], replica["model"]) for replica in listed] == [("one", "accepting", "tiny")]
    assert listed[0]["blocks"] > 10
    assert listed[0]["epoch"] > 0
    assert listed[0]["load"]["free_blocks"] > 0
    assert listed[0]["active"] == 0


async def test_the_router_tokenizes_as_its_replicas_do(live: LiveFleet) -> None:
    one = await live.replica("one")
    b = await live.router()
    for body in ({"messages": [{"role": "user", "content": "Warm up."}]}, {"prompt": "Warm up.", "model": "tiny"}):
        answers = []
        for url in (one.url, b.router.url):
            async with b.client.post(url + "/tokenize", json=body) as response:
                assert response.status == 200
                answers.append((await response.json())["tokens"])
        assert answers[0] == answers[1]


async def test_a_replica_that_leaves_is_used_no_more_and_what_was_kept_for_it_is_forgotten(live: LiveFleet) -> None:
    await live.replica("one")
    await live.replica("two")
    b = await live.router()
    await say(b.client, b.router.url, story("leave"))
    await live.replicas.pop("one").stop(0)
    await eventually(lambda: [replica.id for replica in b.router.fleet] == ["two"], what="one has left")
    assert {headers(await say(b.client, b.router.url, story("leave")))[0] for _ in range(4)} == {"two"}
    await b.settled()


async def test_when_redis_goes_away_requests_are_routed_by_the_last_view(live: LiveFleet) -> None:
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(restartable_redis())
        live.redis_url = redis.url
        await live.replica("one")
        two = await live.replica("two")
        b = await live.router()
        await say(b.client, two.url, story("stale"))
        await eventually(lambda: b.router.index.held("two").device.blocks > 10)
        redis.kill()
        await eventually(lambda: b.router.view.step == "stale", what="the view is stale")
        answer = await say(b.client, b.router.url, story("stale"))
        assert (headers(answer)[0], answer.headers["x-warmroute-view"]) == ("two", "stale")
        assert headers(answer)[1] > 200
        await live.stop()
        live.replicas.clear()


async def test_a_router_without_redis_says_so_and_joins_when_it_comes() -> None:
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(restartable_redis())
        redis.kill()
        fleet = LiveFleet(stack, redis.url)
        stack.push_async_callback(fleet.stop)
        router = await stack.enter_async_context(Router(RouterSettings(host="127.0.0.1", port=0, redis=redis.url)))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        async with client.get(router.url + "/ready") as response:
            assert response.status == 503
            assert "no replica has joined yet" in (await response.json())["error"]["message"]
        async with client.get(router.url + "/health") as response:
            assert response.status == 200
        redis.restart()
        await fleet.replica("one")
        await eventually(lambda: len(router.fleet) == 1, what="one has joined")
        assert headers(await say(client, router.url, story("late")))[0] == "one"


@pytest.mark.parametrize(("prompt", "says"), [([10**9], "not in the vocabulary"), ("", "empty"), ([], "empty")])
async def test_tokenizing_a_prompt_that_no_engine_takes_is_refused_as_the_engine_would(
    live: LiveFleet, prompt: object, says: str
) -> None:
    server = await live.replica("a")
    b = await live.router()
    for url in (b.router.url, server.url):
        async with b.client.post(url + "/tokenize", json={"prompt": prompt}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (400, "invalid_prompt"), url
            assert says in error["message"]


async def test_official_clients_read_a_model_the_count_of_a_prompt_and_the_id_of_their_request(live: LiveFleet) -> None:
    replica = await live.replica("r1")
    b = await live.router()
    ask: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "How long is this?"}]}
    async with openai.AsyncOpenAI(base_url=b.router.url + "/v1", api_key="x", max_retries=0) as client:
        assert (await client.models.retrieve("tiny")).id == "tiny"
    counts = []
    for url in (b.router.url, replica.url):
        async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as client_of_messages:
            counts.append((await client_of_messages.messages.count_tokens(**ask)).input_tokens)
            raw = await client_of_messages.messages.with_raw_response.create(**ask, max_tokens=1)
            assert raw.request_id == raw.headers["x-request-id"]
            assert raw.headers.get_list("request-id") == [raw.request_id]
    assert counts[0] == counts[1] > 0


async def test_routers_of_one_fleet_see_each_others_work(live: LiveFleet) -> None:
    await live.replica("one", sim_base_seconds=1.0)
    here, there = await live.router(), await live.router()
    asking = asyncio.create_task(say(here.client, here.router.url, story("plum")))
    await eventually(lambda: there.router.placement.ledger.active("one") == 1, what="the other router's request")
    assert there.router.admission.in_flight == 0
    await asking
    await eventually(lambda: there.router.placement.ledger.active("one") == 0, what="its end")
    await here.settled()
    await there.settled()
