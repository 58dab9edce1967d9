"""Routers are stopped and killed under load: each client is told, replicas stop for the dead, others take over."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.chaos.answers import Load
from tests.chaos.conftest import Chaos

# What the loop of a client meets where nobody listens any more.
REFUSED = {"ClientConnectorError", "ServerDisconnectedError", "ClientOSError"}


async def test_a_router_that_is_stopped_refuses_what_is_new_and_tells_streams_it_must_cut(chaos: Chaos) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2000, "stream": True}
    async with chaos.client.post(chaos.url + "/v1/chat/completions", json=body) as running:
        await running.content.readany()
        chaos.router.terminate()
        async with asyncio.timeout(10):
            while True:
                async with chaos.client.get(chaos.url + "/ready") as ready:
                    if ready.status == 503:
                        break
        said = await asyncio.wait_for(running.content.read(), 10)
    assert b'"shutting_down"' in said
    assert said.endswith(b"data: [DONE]\n\n")
    assert await asyncio.to_thread(chaos.router.wait, 10)
    assert chaos.router.exit_code == 0


async def test_a_router_that_is_stopped_under_load_ends_every_request_in_order(chaos: Chaos) -> None:
    async with Load(chaos.url) as load:
        await load.answered(20)
        chaos.router.terminate()
        assert await asyncio.to_thread(chaos.router.wait, 20)
    assert chaos.router.exit_code == 0
    # Within the grace time what was under way ends well; what came after it began is told to go elsewhere.
    assert all(answer.refused and answer.status == 503 for answer in load.not_whole), load.not_whole
    assert load.cut.keys() <= REFUSED, load.cut
    second = chaos.start_router("second")
    chaos.url = await chaos.ready(second)
    await chaos.until(lambda fleet: len(fleet["replicas"]) == 3, "the next router knows all")
    assert (await chaos.ask()).whole
    await chaos.settled()
    await chaos.hung_up()


async def test_a_killed_router_leaves_no_work_behind_and_the_other_answers_on(chaos: Chaos) -> None:
    second_url = await chaos.ready(chaos.start_router("second"))
    await chaos.until(lambda fleet: len(fleet["replicas"]) == 3, "the second router knows all", second_url)
    async with Load(second_url) as survivors, Load(chaos.url) as orphans:
        await survivors.answered(20)
        await orphans.answered(20)
        body = {"model": "tiny", "prompt": "x", "max_tokens": 3000, "stream": True}
        async with chaos.client.post(chaos.url + "/v1/completions", json=body) as running:
            await running.content.readany()
            chaos.router.kill()
            with pytest.raises(aiohttp.ClientError):  # nobody is there to tell it: what is not whole does not look so
                await asyncio.wait_for(running.content.read(), 10)
        await survivors.answered(20)
    assert not survivors.not_whole
    assert not survivors.cut
    assert not orphans.not_whole
    assert sum(orphans.cut.values()) >= 8
    await chaos.settled(second_url)  # what the other had under way is forgotten, and replicas compute nothing more
    await chaos.hung_up()
