"""The replica's HTTP as its clients see it: answers, streams, usage, errors."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from replica.server import ReplicaServer
from tests.broken_http import BROKEN_HTTP, answer_to
from tests.replica.sim_server import CHAT, HELLO, serving

BLOCK_SIZE = 16


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def replica() -> AsyncIterator[tuple[ReplicaServer, aiohttp.ClientSession]]:
    async with serving(max_body_bytes=64 * 1024, max_model_len=1024) as both:
        yield both


@pytest.fixture
def client(replica: tuple[ReplicaServer, aiohttp.ClientSession]) -> aiohttp.ClientSession:
    return replica[1]


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def post(client: aiohttp.ClientSession, path: str, body: object) -> tuple[aiohttp.ClientResponse, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client.post(path, data=data) as response:
        return response, json.loads(await response.read())


async def events(client: aiohttp.ClientSession, path: str, body: object) -> list[Any]:
    async with client.post(path, json=body) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        text = (await response.read()).decode()
    return [frame.partition("data: ")[2] for frame in text.split("\n\n") if frame]


async def test_a_chat_answer_has_text_usage_and_headers(client: aiohttp.ClientSession) -> None:
    response, answer = await post(client, CHAT, HELLO)
    assert response.status == 200
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    assert response.headers["x-warmroute-replica"]
    assert response.headers["x-warmroute-cached-tokens"] == str(usage["prompt_tokens_details"]["cached_tokens"])


async def test_a_stream_is_the_same_answer_in_pieces(client: aiohttp.ClientSession) -> None:
    _, whole = await post(client, CHAT, HELLO)
    frames = await events(client, CHAT, HELLO | {"stream": True, "stream_options": {"include_usage": True}})
    assert frames.pop() == "[DONE]"
    chunks = [json.loads(frame) for frame in frames]
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 8
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_a_stream_without_the_option_has_no_usage_chunk(client: aiohttp.ClientSession) -> None:
    frames = await events(client, CHAT, HELLO | {"stream": True})
    assert all("usage" not in json.loads(frame) for frame in frames[:-1])


async def test_a_completion_continues_text_or_tokens_alike(client: aiohttp.ClientSession) -> None:
    _, tokenized = await post(client, "/tokenize", {"prompt": "once upon a time"})
    body = {"model": "tiny", "max_tokens": 5}
    _, from_text = await post(client, "/v1/completions", body | {"prompt": "once upon a time"})
    _, from_tokens = await post(client, "/v1/completions", body | {"prompt": tokenized["tokens"]})
    assert from_text["object"] == "text_completion"
    assert from_text["choices"][0]["text"] == from_tokens["choices"][0]["text"] != ""
    assert from_text["usage"]["prompt_tokens"] == tokenized["count"]
    frames = await events(client, "/v1/completions", body | {"prompt": "once upon a time", "stream": True})
    assert "".join(json.loads(f)["choices"][0]["text"] for f in frames[:-1]) == from_text["choices"][0]["text"]


async def test_the_second_turn_finds_the_first_in_the_cache_and_says_so(client: aiohttp.ClientSession) -> None:
    opening = {"role": "user", "content": "tell me of the river " * 20}
    _, first = await post(client, CHAT, HELLO | {"messages": [opening], "max_tokens": 40})
    answer = first["choices"][0]["message"]
    messages = [opening, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "and then"}]
    response, second = await post(client, CHAT, HELLO | {"messages": messages})
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    computed = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 1
    assert cached == computed - computed % BLOCK_SIZE
    assert response.headers["x-warmroute-cached-tokens"] == str(cached)
    details = second["usage"]["prompt_tokens_details"]
    assert cached + details["cache_write_tokens"] == second["usage"]["prompt_tokens"] // BLOCK_SIZE * BLOCK_SIZE


async def test_a_streams_headers_already_tell_the_cached_tokens(client: aiohttp.ClientSession) -> None:
    body = HELLO | {"messages": [{"role": "user", "content": "a stream of water " * 20}], "stream": True}
    told = []
    for _ in range(2):
        async with client.post(CHAT, json=body) as response:
            told.append(int(response.headers["x-warmroute-cached-tokens"]))
            await response.read()
    assert told[0] == 0
    assert told[1] >= 2 * BLOCK_SIZE


async def test_anthropic_usage_adds_up_to_all_input_tokens(client: aiohttp.ClientSession) -> None:
    body = HELLO | {"messages": [{"role": "user", "content": "count the sheep " * 30}]}
    _, openai = await post(client, CHAT, body)
    _, answer = await post(client, "/v1/messages", body)
    usage = answer["usage"]
    read, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
    assert usage["input_tokens"] + read + written == openai["usage"]["prompt_tokens"]
    assert read > 0
    assert answer["content"] == [{"type": "text", "text": openai["choices"][0]["message"]["content"]}]
    assert answer["stop_reason"] == "max_tokens"


async def test_an_anthropic_stream_has_all_events_in_order(client: aiohttp.ClientSession) -> None:
    kinds = [json.loads(frame)["type"] for frame in await events(client, "/v1/messages", HELLO | {"stream": True})]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_a_stop_string_cuts_exactly_there(client: aiohttp.ClientSession) -> None:
    body = HELLO | {"max_tokens": 30}
    _, whole = await post(client, CHAT, body)
    text = whole["choices"][0]["message"]["content"]
    stop = text[20:30]
    _, cut = await post(client, CHAT, body | {"stop": [stop]})
    assert cut["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] < 30
    _, message = await post(client, "/v1/messages", body | {"stop_sequences": [stop]})
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    frames = await events(client, CHAT, body | {"stop": stop, "stream": True})
    pieces = [json.loads(frame)["choices"][0]["delta"].get("content", "") for frame in frames[:-1]]
    assert "".join(pieces) == text[: text.index(stop)]


async def test_a_stop_token_ends_the_answer_and_is_not_shown(client: aiohttp.ClientSession) -> None:
    _, whole = await post(client, CHAT, HELLO | {"max_tokens": 20})
    text = whole["choices"][0]["message"]["content"]
    _, tokens = await post(client, "/tokenize", {"prompt": text})
    _, cut = await post(client, CHAT, HELLO | {"max_tokens": 20, "stop_token_ids": [tokens["tokens"][5]]})
    assert cut["choices"][0]["finish_reason"] == "stop"
    shown = cut["choices"][0]["message"]["content"]
    assert text.startswith(shown)
    assert cut["usage"]["completion_tokens"] <= 6


async def test_without_max_tokens_the_answer_fills_the_context(client: aiohttp.ClientSession) -> None:
    for path, asked in ((CHAT, {"messages": HELLO["messages"]}), ("/v1/completions", {"prompt": [300] * 900})):
        _, answer = await post(client, path, {"model": "tiny"} | asked)
        assert answer["usage"]["total_tokens"] == 1024
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_tokenize_counts_what_a_request_would(client: aiohttp.ClientSession) -> None:
    _, answer = await post(client, CHAT, HELLO)
    _, tokenized = await post(client, "/tokenize", HELLO)
    assert tokenized["count"] == len(tokenized["tokens"]) == answer["usage"]["prompt_tokens"]
    assert tokenized["max_model_len"] == 1024


async def test_the_quiet_paths_answer(client: aiohttp.ClientSession) -> None:
    for path, key in (("/health", "status"), ("/ready", "status"), ("/version", "version"), ("/cache", "keys")):
        async with client.get(path) as response:
            assert response.status == 200
            assert key in await response.json()
    async with client.get("/v1/models") as response:
        [card] = (await response.json())["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 1024)
    async with client.get("/v1/models/tiny") as response:
        assert await response.json() == card
    async with client.get("/v1/models/some/other") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")


async def test_counting_the_tokens_of_messages_counts_what_the_request_would(client: aiohttp.ClientSession) -> None:
    ask = {name: value for name, value in HELLO.items() if name != "max_tokens"} | {"system": "be brief"}
    response, counted = await post(client, "/v1/messages/count_tokens", ask)
    _, message = await post(client, "/v1/messages", ask | {"max_tokens": 1})
    usage = message["usage"]
    whole = usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    assert counted == {"input_tokens": whole}
    assert response.headers["request-id"] == response.headers["x-request-id"]
    response, refusal = await post(client, "/v1/messages/count_tokens", ask | {"model": "other"})
    assert (response.status, refusal["error"]["type"]) == (404, "not_found_error")


async def test_resetting_the_cache_empties_it(client: aiohttp.ClientSession) -> None:
    body = HELLO | {"messages": [{"role": "user", "content": "remember this " * 30}]}
    await post(client, CHAT, body)
    _, warm = await post(client, CHAT, body)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    response, reset = await post(client, "/reset_prefix_cache", b"")
    assert response.status == 200
    assert reset["removed_blocks"] > 0
    async with client.get("/cache") as described:
        assert (await described.json())["held_blocks"] == 0
    _, cold = await post(client, CHAT, body)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_tenants_never_share_blocks(client: aiohttp.ClientSession) -> None:
    body = HELLO | {"messages": [{"role": "user", "content": "a secret between us " * 20}]}
    cached = []
    for tenant in ("a", "b", "a"):
        async with client.post(CHAT, json=body, headers={"x-warmroute-tenant": tenant}) as response:
            cached.append((await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


async def test_a_sane_request_id_is_kept_and_any_other_replaced(client: aiohttp.ClientSession) -> None:
    for given, kept in (("abc-1.2:3", True), ("x" * 129, False), ("spaces are not sane", False)):
        async with client.post(CHAT, json=HELLO, headers={"x-request-id": given}) as response:
            assert (response.headers["x-request-id"] == given) is kept


async def test_metrics_count_requests_and_tokens(client: aiohttp.ClientSession) -> None:
    await post(client, CHAT, HELLO)
    await post(client, CHAT, b"{")
    async with client.get("/metrics") as response:
        assert response.content_type == "text/plain"
        text = await response.text()
    for line in (
        'warmroute_requests_total{endpoint="/v1/chat/completions",outcome="ok"}',
        'warmroute_requests_total{endpoint="/v1/chat/completions",outcome="invalid_json"}',
        "warmroute_time_to_first_token_seconds_bucket",
        "warmroute_time_per_output_token_seconds_sum",
        "warmroute_e2e_request_latency_seconds_count",
        "warmroute_prefix_cache_queries_total",
        "warmroute_prefix_cache_hits_total",
        "warmroute_kv_cache_usage_ratio 0.0",
        "warmroute_num_requests_running 0.0",
        "warmroute_num_requests_waiting 0.0",
    ):
        assert line in text, line


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        (CHAT, b"{", 400, "invalid_json"),
        (CHAT, HELLO | {"temperature": "hot"}, 400, "invalid_type"),
        (CHAT, HELLO | {"max_tokens": -1}, 400, "invalid_value"),
        (CHAT, HELLO | {"best_of": 2}, 400, "unsupported_parameter"),
        (CHAT, HELLO | {"model": "other"}, 404, "model_not_found"),
        (CHAT, HELLO | {"messages": [{"role": "user", "content": "x " * 2000}]}, 400, "context_length_exceeded"),
        (CHAT, HELLO | {"max_tokens": 1020}, 400, "context_length_exceeded"),
        (CHAT, b" " * 70_000, 413, "request_too_large"),
        ("/v1/completions", {"model": "tiny", "prompt": ""}, 400, "invalid_prompt"),
        ("/v1/completions", {"model": "tiny", "prompt": [10**9]}, 400, "invalid_prompt"),
        (CHAT, HELLO | {"max_tokens": 0}, 400, "invalid_value"),
        (CHAT, HELLO | {"logit_bias": {"99999999": 1}}, 400, "invalid_value"),
        ("/v1/messages", HELLO | {"max_tokens": -1}, 400, "invalid_value"),
        ("/tokenize", {"model": "other", "prompt": "x"}, 404, "model_not_found"),
        ("/nowhere", {}, 404, "path_not_found"),
        ("/health", {}, 405, "method_not_allowed"),
    ],
)
async def test_bad_requests_get_the_apis_error(
    client: aiohttp.ClientSession, path: str, body: object, status: int, code: str
) -> None:
    response, answer = await post(client, path, body)
    assert (response.status, answer["error"]["code"]) == (status, code)
    assert answer["error"]["message"]
    assert response.headers["x-request-id"]
    assert ("type" in answer) is (path == "/v1/messages")


async def test_a_prompt_too_long_is_told_both_numbers(client: aiohttp.ClientSession) -> None:
    body = {"model": "tiny", "prompt": [7] * 1500}
    _, answer = await post(client, "/v1/completions", body)
    assert "1500" in answer["error"]["message"]
    assert "1024" in answer["error"]["message"]


async def test_a_wrong_method_is_told_the_right_one(client: aiohttp.ClientSession) -> None:
    async with client.get(CHAT) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"


async def test_a_body_that_is_not_what_its_encoding_says_is_refused(client: aiohttp.ClientSession) -> None:
    async with client.post(CHAT, data=b"not gzip", headers={"Content-Encoding": "gzip"}, compress=False) as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "invalid_body"


async def test_a_body_may_come_compressed_but_not_to_smuggle_in_a_larger_one(client: aiohttp.ClientSession) -> None:
    headers = {"Content-Encoding": "gzip"}
    async with client.post(CHAT, data=gzip.compress(json.dumps(HELLO).encode()), headers=headers) as response:
        assert response.status == 200
    async with client.post(CHAT, data=gzip.compress(b" " * 10_000_000), headers=headers) as response:
        assert response.status == 413


async def test_a_refusal_before_any_handler_still_carries_its_headers(client: aiohttp.ClientSession) -> None:
    async with client.post(CHAT, json=HELLO, headers={"Expect": "the unexpected"}) as response:
        assert response.status == 417
        assert response.headers["x-request-id"]
        assert response.content_type == "application/json"
        assert (await response.json())["error"]["code"] == "expectation_failed"


async def test_what_is_not_http_gets_the_apis_error_too() -> None:
    async with serving() as (server, _):
        for sent in BROKEN_HTTP:
            status, headers, body = await answer_to(server.url, sent)
            assert status in (400, 431)
            assert headers["content-type"].startswith("application/json")
            assert body["error"]["code"] == "invalid_http"
