"""Clients that leave in every state, all at once, and a router that goes: nothing leaks, everyone is told."""

from __future__ import annotations

import asyncio
import random
from urllib.parse import urlsplit

from tests.chaos.conftest import Chaos

_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
_BODY = b'{"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200, "stream": %s}'


async def leave(url: str, sent: bytes, after_bytes: int, seconds: float) -> None:
    """Send, wait for so many bytes of answer or so long, and hang up without a word."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(sent)
        async with asyncio.timeout(seconds):
            await reader.readexactly(after_bytes)
    except (TimeoutError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.transport.abort()


def request(stream: bool) -> bytes:
    body = _BODY % (b"true" if stream else b"false")
    return _HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def test_clients_that_leave_in_any_state_leave_nothing_behind(chaos: Chaos) -> None:
    whole = request(True)
    states = [
        (_HEAD[:40], 1),  # half a head
        (whole[:-20], 1),  # half a body
        (request(False), 1 << 20),  # an answer that is being computed
        (whole, 1 << 20),  # before, or in the middle of, a stream
        (whole, 400),  # right after the head
        (b"", 1),  # nothing at all
    ]
    chosen = random.Random(7)
    await asyncio.gather(
        *(leave(chaos.url, *states[number % len(states)], chosen.uniform(0.02, 0.5)) for number in range(120))
    )
    await chaos.settled()
    assert (await chaos.ask()).whole


async def test_a_flood_that_disconnects_is_as_if_it_had_never_been(chaos: Chaos) -> None:
    await asyncio.gather(*(leave(chaos.url, request(number % 2 == 0), 1 << 20, 0.1) for number in range(200)))
    answer = await asyncio.wait_for(chaos.ask(tokens=4), 10)
    assert answer.whole
    await chaos.settled()


async def test_five_hundred_streams_at_once_all_end_well(chaos: Chaos) -> None:
    answers = await asyncio.gather(*(chaos.ask(tokens=4, number=number) for number in range(500)))
    assert all(answer.whole for answer in answers)
    await chaos.settled()


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


async def test_a_drained_replica_gets_nothing_new_and_ends_its_stream_well(chaos: Chaos) -> None:
    streams = [asyncio.create_task(chaos.ask(tokens=150, number=number)) for number in range(6)]
    await chaos.until(lambda fleet: all(each["active"] for each in fleet["replicas"]), "work on every replica")
    async with chaos.client.post(chaos.url + "/replicas/r1/drain") as response:
        assert response.status == 200
    later = await asyncio.gather(*(chaos.ask(tokens=2, number=number) for number in range(8)))
    assert {answer.replica for answer in later} == {"r2", "r3"}
    assert all(answer.whole for answer in [*later, *await asyncio.gather(*streams)])
    await chaos.settled()
