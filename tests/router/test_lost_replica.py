"""A replica that freezes keeps its connections open and answers nothing; its lease is what tells."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import aiohttp
from aiohttp import web

from router.app import Router
from shared.settings import RouterSettings
from tests.fleet_members import Member
from tests.helpers import eventually
from tests.router.conftest import BenchFactory, chat
from tests.router.fake_replica import FakeReplica, answer, open_stream


async def silent(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


async def head_and_nothing(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
    response = await open_stream(request)
    await asyncio.Event().wait()
    return response


async def test_requests_that_wait_for_a_frozen_replica_move_on_when_its_lease_ends(redis_url: str) -> None:
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeReplica()) for _ in range(2)]
        members = [
            await stack.enter_async_context(Member(redis_url, f"r{number}", url=fake.url, model="fake"))
            for number, fake in enumerate(fakes)
        ]
        settings = RouterSettings(port=0, redis=redis_url, policy="round-robin")
        router = await stack.enter_async_context(Router(settings))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        await eventually(lambda: len(router.fleet) == 2, what="both replicas known")
        fakes[0].behave, fakes[1].behave = silent, answer

        url = router.url + "/v1/chat/completions"
        posts = [asyncio.create_task(client.post(url, json=chat(stream=number % 2 == 0))) for number in range(6)]
        await eventually(lambda: fakes[0].active == 3, what="half of the requests at the frozen replica")
        await members[0].crash()

        responses = await asyncio.wait_for(asyncio.gather(*posts), 20)
        assert [response.status for response in responses] == [200] * 6
        assert {response.headers["x-warmroute-replica"] for response in responses} == {"r1"}
        await eventually(lambda: router.admission.in_flight == 0, what="nothing in flight")
        assert router.placement.ledger.total_active == 0
        await eventually(lambda: fakes[0].active == 0, what="connections to the frozen replica closed")


async def test_a_head_without_a_byte_of_answer_moves_on_too_and_an_answer_under_way_does_not(
    bench: BenchFactory,
) -> None:
    b = await bench(2)
    b.replicas[0].behave = b.replicas[1].behave = head_and_nothing
    waiting = asyncio.create_task(b.client.post(b.url, json=chat()))
    await eventually(lambda: b.seen == 1, what="the request at a replica")
    frozen, other = sorted(b.replicas, key=lambda replica: len(replica.seen), reverse=True)
    other.behave = answer

    b.router._upstream.lose(frozen.url)

    async with await asyncio.wait_for(waiting, 5) as response:
        assert response.headers["x-warmroute-replica"] == other.id
        assert (await response.read()).endswith(b"data: [DONE]\n\n")

    async def half(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        begun = await open_stream(request)
        await begun.write(b'data: {"chunk": 0}\n\n')
        await go_on.wait()
        await begun.write(b"data: [DONE]\n\n")
        return begun

    go_on = asyncio.Event()
    frozen.behave = other.behave = half
    async with b.client.post(b.url, json=chat()) as response:
        await response.content.readuntil(b"\n\n")
        for replica in b.replicas:
            b.router._upstream.lose(replica.url)
        go_on.set()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
    await b.settled()
