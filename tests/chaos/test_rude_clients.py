"""Clients that leave in every state, all at once: nothing leaks, nobody computes for them, others are answered."""

from __future__ import annotations

import asyncio
import random
from urllib.parse import urlsplit

import pytest

from tests.broken_http import reset
from tests.chaos.conftest import Chaos, accepting

_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
_BODY = b'{"model": "tiny", "messages": [{"role": "user", "content": "%s"}], "max_tokens": 200, "stream": %s}'


async def leave(url: str, sent: bytes, after_bytes: int, seconds: float, *, abruptly: bool = True) -> None:
    """Send, wait for so many bytes of answer or so long, and hang up: with a reset, or as if there were time."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(sent)
        async with asyncio.timeout(seconds):
            await reader.readexactly(after_bytes)
    except (TimeoutError, asyncio.IncompleteReadError):
        pass
    finally:
        if abruptly:
            reset(writer)
        else:
            writer.close()


def request(stream: bool, content: str = "hello") -> bytes:
    body = _BODY % (content.encode(), b"true" if stream else b"false")
    return _HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("abruptly", [True, False], ids=["by a reset", "by a FIN"])
async def test_clients_that_leave_in_any_state_leave_nothing_behind(chaos: Chaos, abruptly: bool) -> None:
    whole = request(True)
    chunked = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    states = [
        (b"", 1),  # nothing at all
        (_HEAD[:40], 1),  # half a head
        (_HEAD + b"Content-Length: 100\r\n\r\n", 1),  # a head
        (_HEAD + b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n", 25),  # asked for the body
        (whole[:-20], 1),  # half a body
        (chunked + b"20\r\n{", 1),  # half a chunk
        (request(False), 1 << 20),  # an answer that is being computed
        (whole, 1 << 20),  # before, or in the middle of, a stream
        (whole, 400),  # right after the head
        (whole + whole + request(False), 1 << 20),  # with more requests behind it
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", 30),  # after an answer
        (b"nonsense\r\n\r\n", 30),  # after a refusal
    ]
    chosen = random.Random(7)
    await asyncio.gather(
        *(
            leave(chaos.url, *states[each % len(states)], chosen.uniform(0.02, 0.5), abruptly=abruptly)
            for each in range(240)
        )
    )
    await chaos.settled()
    assert (await chaos.ask()).whole
    await chaos.hung_up()


@pytest.mark.parametrize(
    "chaos", [("--max-running", "2", "--token-budget", "64", "--sim-per-token-seconds", "0.001")], indirect=True
)
@pytest.mark.parametrize("abruptly", [True, False], ids=["by a reset", "by a FIN"])
async def test_nobody_computes_for_clients_that_left_while_they_were_queued_or_their_prompt_was_computed(
    chaos: Chaos, abruptly: bool
) -> None:
    """A step takes 64 tokens and 70 ms; the prompts together some 20 s at each replica."""
    prompts = [f"{number} " * 1000 for number in range(24)]
    longest = min([len(await tokens_of(chaos, prompt)) for prompt in prompts])
    leaving = [
        leave(chaos.url, request(number % 2 == 0, prompt), 1 << 20, 1.0, abruptly=abruptly)
        for number, prompt in enumerate(prompts)
    ]
    await asyncio.gather(*leaving)
    await chaos.settled()
    computed = [
        await chaos.metric("warmroute_computed_tokens_total", each.url or "") for each in chaos.replicas.values()
    ]
    assert 0 < sum(computed) < longest * len(prompts) / 4
    assert (await asyncio.wait_for(chaos.ask(tokens=4), 10)).whole
    await chaos.settled()


async def tokens_of(chaos: Chaos, text: str) -> list[int]:
    body = {"messages": [{"role": "user", "content": text}]}
    async with chaos.client.post(chaos.url + "/tokenize", json=body) as response:
        tokens: list[int] = (await response.json())["tokens"]
        return tokens


async def test_a_flood_that_disconnects_is_as_if_it_had_never_been(chaos: Chaos) -> None:
    await asyncio.gather(*(leave(chaos.url, request(number % 2 == 0), 1 << 20, 0.1) for number in range(200)))
    answer = await asyncio.wait_for(chaos.ask(tokens=4), 10)
    assert answer.whole
    await chaos.settled()


async def test_a_flood_that_disconnects_while_it_waits_for_the_router_is_as_if_it_had_never_been(chaos: Chaos) -> None:
    chaos.url = await chaos.ready(chaos.start_router("full", "--max-in-flight", "4", "--max-queue", "500"))
    await chaos.until(lambda fleet: len(accepting(fleet)) == 3, "three replicas known")
    await asyncio.gather(*(leave(chaos.url, request(number % 2 == 0), 1 << 20, 0.1) for number in range(200)))
    assert (await asyncio.wait_for(chaos.ask(tokens=4), 10)).whole
    await chaos.settled()
    assert await chaos.metric("warmroute_router_requests_queued") == 0


async def test_five_hundred_streams_at_once_all_end_well(chaos: Chaos) -> None:
    answers = await asyncio.gather(*(chaos.ask(tokens=4, number=number) for number in range(500)))
    assert all(answer.whole for answer in answers)
    await chaos.settled()


async def test_a_drained_replica_gets_nothing_new_and_ends_its_stream_well(chaos: Chaos) -> None:
    streams = [asyncio.create_task(chaos.ask(tokens=150, number=number)) for number in range(6)]
    await chaos.until(lambda fleet: all(each["active"] for each in fleet["replicas"]), "work on every replica")
    async with chaos.client.post(chaos.url + "/replicas/r1/drain") as response:
        assert response.status == 200
    later = await asyncio.gather(*(chaos.ask(tokens=2, number=number) for number in range(8)))
    assert {answer.replica for answer in later} == {"r2", "r3"}
    assert all(answer.whole for answer in [*later, *await asyncio.gather(*streams)])
    await chaos.settled()
