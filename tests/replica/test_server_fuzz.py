"""Whatever body comes, the answer is an answer or the API's own error, and the server goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.api import GENERATION_PATHS, ApiError, parse_generation, parse_routing
from tests.replica.sim_server import CHAT, HELLO, serving

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800")
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))
FIELDS = (
    *("model", "messages", "prompt", "system", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"),
    *("seed", "stop", "stop_sequences", "stop_token_ids", "stream", "stream_options", "n", "logit_bias", "tools"),
    *("tool_choice", "metadata", "user", "ignore_eos", "add_generation_prompt", "continue_final_message"),
    *("chat_template_kwargs", "prompt_cache_key", "thinking", "response_format", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "logprobs", "top_logprobs"),
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "system", "tool"]) | JSON,
            "content": st.text(max_size=20) | JSON,
            "tool_calls": JSON,
            "name": JSON,
        },
    ),
    max_size=3,
)
BASE: dict[str, Any] = {"model": "tiny", "prompt": "x"} | HELLO
BODIES = st.builds(
    lambda changed, messages: json.dumps(BASE | changed | ({"messages": messages} if messages else {})).encode(),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
    st.none() | MESSAGES,
)
BYTES = st.binary(max_size=50) | st.builds(lambda body, at: body[: at % len(body)], BODIES, st.integers(0, 10_000))


@given(st.sampled_from(GENERATION_PATHS), BODIES | BYTES)
def test_a_router_is_never_stricter_than_a_replica(path: str, body: bytes) -> None:
    try:
        request = parse_generation(path, body)
    except ApiError:
        return
    assert parse_routing(path, body) == request.routing


async def test_any_body_gets_a_proper_answer_and_the_server_goes_on() -> None:
    async with serving(max_model_len=256, sim_base_seconds=0) as (server, client):
        loop = asyncio.get_running_loop()

        def check(path: str, body: bytes) -> None:
            asyncio.run_coroutine_threadsafe(answered(client, path, body), loop).result(30)

        property_test = settings(
            deadline=None, max_examples=150, suppress_health_check=[HealthCheck.nested_given, HealthCheck.too_slow]
        )(given(st.sampled_from((*GENERATION_PATHS, "/tokenize")), BODIES | BYTES)(check))
        await asyncio.to_thread(property_test)
        assert server.service is not None
        assert server.service.engine.alive
        assert server.service.engine.state().failed_steps == 0
        async with client.post(CHAT, json=HELLO) as response:
            assert response.status == 200


async def answered(client: aiohttp.ClientSession, path: str, body: bytes) -> None:
    async with client.post(path, data=body) as response:
        text = await response.text()
        if response.status == 200:
            assert text
            assert '"error"' not in text
            return
        assert response.status in (400, 404), text
        error = json.loads(text)["error"]
        assert error["code"]
        assert error["message"]
