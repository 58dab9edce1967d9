"""The client reads streams, usage and headers, and tells a failure from an answer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
from aiohttp import web

from loadtest.chat_client import Answer, ChatClient, ChatRequest, RequestFailedError
from tests.loadtest.scripted_server import Reply, frames, serving, stream

BODY = msgspec.json.encode(ChatRequest(model="m", messages=[{"role": "user", "content": "hello"}], max_tokens=4))


async def ask(reply: Reply, timeout_seconds: float = 10.0) -> Answer:
    async with serving(reply) as url:
        return await asyncio.to_thread(ChatClient(url, timeout_seconds).ask, BODY)


async def test_an_answer_has_text_usage_headers_and_clock_readings() -> None:
    bodies: list[dict[str, Any]] = []

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        bodies.append(body)
        headers = {"x-warmroute-replica": "replica-1", "X-Warmroute-Predicted-Tokens": "32"}
        return await stream(request, frames(" one", " two"), headers=headers)

    began = time.perf_counter()
    answer = await ask(reply)
    assert (answer.text, answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (
        " one two",
        40,
        16,
        2,
    )
    assert answer.headers == {"replica": "replica-1", "predicted-tokens": "32"}
    assert began < answer.first_token_at <= answer.ended_at
    assert bodies[0]["stream"] is True
    assert bodies[0]["stream_options"] == {"include_usage": True}
    assert bodies[0]["temperature"] == 0


async def test_frames_may_be_cut_anywhere() -> None:
    whole = b"".join(frames(" na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve"))

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, [whole[at : at + 7] for at in range(0, len(whole), 7)])

    assert (await ask(reply)).text == " na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve"


async def test_the_opening_chunk_without_text_is_no_first_token() -> None:
    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, frames(" one"), pause_seconds=0.1)

    began = time.perf_counter()
    assert (await ask(reply)).first_token_at - began >= 0.2


async def test_a_refusal_is_a_failure_with_its_status() -> None:
    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "busy"}}, status=429)

    with pytest.raises(RequestFailedError, match="busy") as failure:
        await ask(reply)
    assert failure.value.status == 429


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (frames(" one")[:-1], "broke off"),
        ([*frames(" one")[:2], b'data: {"error": {"message": "engine died"}}\n\n', b"data: [DONE]\n\n"], "engine died"),
        ([*frames(" one")[:-2], b"data: [DONE]\n\n"], "without usage"),
        ([b"data: {not json\n\n"], "DecodeError"),
    ],
    ids=["broken off", "error in the stream", "no usage", "not JSON"],
)
async def test_a_stream_that_does_not_end_well_is_a_failure(pieces: list[bytes], message: str) -> None:
    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, pieces)

    with pytest.raises(RequestFailedError, match=message):
        await ask(reply)


async def test_a_stream_that_trickles_on_past_the_time_limit_is_a_failure() -> None:
    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, frames(*[" word"] * 100), pause_seconds=0.05)

    with pytest.raises(RequestFailedError, match=r"within 0\.3 s"):
        await ask(reply, timeout_seconds=0.3)


async def test_nobody_listening_is_a_failure() -> None:
    with pytest.raises(RequestFailedError, match="ConnectionRefusedError"):
        await asyncio.to_thread(ChatClient("http://127.0.0.1:9", 1.0).ask, BODY)


def test_a_host_that_is_no_url_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a URL"):
        ChatClient("localhost:8000", 1.0)
