"""Several answers to one prompt, log probabilities, no answer at all, and the precondition: over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from replica.server import ReplicaServer
from tests.helpers import eventually
from tests.replica.sim_server import CHAT, HELLO, serving

COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
LONG = {"messages": [{"role": "user", "content": "the river and the sea " * 200}]}
EXPECT = "x-warmroute-expect-cached-tokens"


@pytest.fixture
async def replica() -> AsyncIterator[tuple[ReplicaServer, aiohttp.ClientSession]]:
    async with serving() as both:
        yield both


@pytest.fixture
def server(replica: tuple[ReplicaServer, aiohttp.ClientSession]) -> ReplicaServer:
    return replica[0]


@pytest.fixture
def client(replica: tuple[ReplicaServer, aiohttp.ClientSession]) -> aiohttp.ClientSession:
    return replica[1]


async def post(client: aiohttp.ClientSession, path: str, body: dict[str, Any], **headers: str) -> Any:
    async with client.post(path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def status_of(client: aiohttp.ClientSession, body: dict[str, Any]) -> int:
    async with client.post(CHAT, json=body) as response:
        return response.status


async def chunks_of(client: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[Any]:
    async with client.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        frames = [frame.partition("data: ")[2] for frame in (await response.text()).split("\n\n") if frame]
    assert frames.pop() == "[DONE]"
    return [json.loads(frame) for frame in frames]


def computed_tokens(server: ReplicaServer) -> int:
    assert server.service is not None
    return server.service.engine.state().counters.computed_tokens


def is_idle(server: ReplicaServer) -> bool:
    assert server.service is not None
    load = server.service.engine.load()
    return load.running == load.waiting == 0


async def test_n_answers_share_one_prefill_and_count_the_prompt_once(
    server: ReplicaServer, client: aiohttp.ClientSession
) -> None:
    answer = await post(client, CHAT, HELLO | LONG | {"n": 4})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all(choice["finish_reason"] == "length" for choice in answer["choices"])
    usage = answer["usage"]
    assert usage["completion_tokens"] == 4 * 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 32
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    # Each has the last, incomplete block of the prompt to itself, and its own answer.
    assert computed_tokens(server) < usage["prompt_tokens"] + 4 * (16 + 8)


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {}), (COMPLETIONS, {"prompt": "once upon a time"})])
async def test_a_stream_of_several_answers_carries_each_with_its_index(
    client: aiohttp.ClientSession, path: str, prompt: dict[str, str]
) -> None:
    body = HELLO | prompt | {"n": 3, "max_tokens": 5}
    whole = await post(client, path, body)
    chunks = await chunks_of(client, path, body | {"stream_options": {"include_usage": True}})
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 15
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        text = choice["delta"].get("content", "") if path == CHAT else choice["text"]
        texts[choice["index"]] = texts.get(choice["index"], "") + text
        assert choice["index"] not in ends
        if choice["finish_reason"]:
            ends[choice["index"]] = choice["finish_reason"]
    assert ends == {0: "length", 1: "length", 2: "length"}
    for choice in whole["choices"]:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert texts[choice["index"]] == text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_all_its_answers(
    server: ReplicaServer, client: aiohttp.ClientSession, stream: bool
) -> None:
    body = HELLO | {"n": 5, "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    request = asyncio.ensure_future(client.post(CHAT, json=body))
    await eventually(lambda: not is_idle(server))
    if stream:
        (await request).close()
    else:
        request.cancel()
    await eventually(lambda: is_idle(server))
    assert (await post(client, CHAT, HELLO))["usage"]["completion_tokens"] == 8


async def test_more_answers_than_the_engine_takes_are_refused_and_leave_nothing() -> None:
    async with serving(max_running=2, max_waiting=2) as (server, client):
        async with client.post(CHAT, json=HELLO | {"n": 5}) as response:
            assert response.status == 429
        async with asyncio.timeout(5):
            while (status := await status_of(client, HELLO | {"n": 4})) == 429:  # until the engine has let go of them
                continue
        assert status == 200
        await eventually(lambda: is_idle(server))


async def test_each_answer_ends_at_its_own_stop_string(client: aiohttp.ClientSession) -> None:
    body = HELLO | {"n": 2, "max_tokens": 30}
    text = (await post(client, CHAT, body))["choices"][0]["message"]["content"]
    cut = await post(client, CHAT, body | {"stop": text[20:30]})
    assert [choice["finish_reason"] for choice in cut["choices"]] == ["stop", "stop"]
    assert {choice["message"]["content"] for choice in cut["choices"]} == {text[: text.index(text[20:30])]}


async def test_chat_logprobs_tell_every_token_of_the_text_whole_and_streamed(client: aiohttp.ClientSession) -> None:
    body = HELLO | {"max_tokens": 12, "logprobs": True, "top_logprobs": 3}
    [choice] = (await post(client, CHAT, body))["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 12
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == choice["message"]["content"]
    for token in content:  # of the simulated engine each token is certain
        assert token["logprob"] == 0.0
        assert token["top_logprobs"] == [{key: token[key] for key in ("token", "logprob", "bytes")}]
    streamed = [
        token
        for chunk in await chunks_of(client, CHAT, body)
        for token in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content


async def test_completion_logprobs_are_four_lists_of_equal_length(client: aiohttp.ClientSession) -> None:
    body = {"model": "tiny", "prompt": "once upon", "max_tokens": 9, "logprobs": 0}
    [choice] = (await post(client, COMPLETIONS, body))["choices"]
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {9}
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, offset, likeliest in zip(
        logprobs["tokens"], logprobs["text_offset"], logprobs["top_logprobs"], strict=True
    ):
        assert choice["text"][offset:].startswith(token)
        assert likeliest == {token: 0.0}
    chunks = await chunks_of(client, COMPLETIONS, body)
    offsets = [o for chunk in chunks for o in (chunk["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]]
    assert offsets == logprobs["text_offset"]


async def test_logprobs_are_null_unless_asked_for(client: aiohttp.ClientSession) -> None:
    assert (await post(client, CHAT, HELLO))["choices"][0]["logprobs"] is None
    assert (await post(client, COMPLETIONS, HELLO | {"prompt": "x"}))["choices"][0]["logprobs"] is None


async def test_no_tokens_at_all_warm_the_prompt_and_answer_nothing(client: aiohttp.ClientSession) -> None:
    warmed = await post(client, MESSAGES, HELLO | LONG | {"max_tokens": 0})
    assert warmed["content"] == [{"type": "text", "text": ""}]
    assert (warmed["stop_reason"], warmed["usage"]["output_tokens"]) == ("max_tokens", 0)
    assert warmed["usage"]["cache_creation_input_tokens"] > 500
    chat = await post(client, CHAT, HELLO | LONG)
    assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] == warmed["usage"]["cache_creation_input_tokens"]

    completion = await post(client, COMPLETIONS, {"model": "tiny", "prompt": "tea " * 100, "max_tokens": 0})
    [choice] = completion["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert completion["usage"]["completion_tokens"] == 0
    chunks = await chunks_of(client, COMPLETIONS, {"model": "tiny", "prompt": "tea " * 100, "max_tokens": 0})
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]


async def test_a_prompt_that_fills_the_context_can_still_be_warmed() -> None:
    async with serving(max_model_len=64) as (_, client):
        body = {"model": "tiny", "prompt": [300] * 64, "max_tokens": 0}
        assert (await post(client, COMPLETIONS, body))["usage"]["prompt_tokens"] == 64
        async with client.post(COMPLETIONS, json=body | {"max_tokens": 1}) as response:
            assert response.status == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_cache_much_colder_than_expected_is_412_before_any_prefill(
    server: ReplicaServer, client: aiohttp.ClientSession, path: str, stream: bool
) -> None:
    body = HELLO | LONG | {"stream": stream}
    async with client.post(path, json=body, headers={EXPECT: "800"}) as response:
        assert response.status == 412
        assert response.headers["x-warmroute-cached-tokens"] == "0"
        error = (await response.json())["error"]
    assert (error["code"], error["cached_tokens"]) == ("cache_precondition_failed", 0)
    assert computed_tokens(server) == 0

    held = (await post(client, CHAT, HELLO | LONG))["usage"]["prompt_tokens"] // 16 * 16
    async with client.post(path, json=body, headers={EXPECT: "800"}) as response:
        assert response.status == 200
        assert response.headers["x-warmroute-cached-tokens"] == str(held)


async def test_several_answers_to_a_prompt_that_is_too_cold_are_one_412(
    server: ReplicaServer, client: aiohttp.ClientSession
) -> None:
    async with client.post(CHAT, json=HELLO | LONG | {"n": 3}, headers={EXPECT: "800"}) as response:
        assert response.status == 412
    assert computed_tokens(server) == 0
    await eventually(lambda: is_idle(server))


@pytest.mark.parametrize("value", ["-1", "many", "1e3", "9" * 11, "\u0663\u0662"])
async def test_an_expectation_that_is_no_number_is_refused_by_name(client: aiohttp.ClientSession, value: str) -> None:
    async with client.post(CHAT, json=HELLO, headers={EXPECT: value}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == EXPECT
