"""The official clients of both dialects, against a whole replica."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anthropic
import openai
import pytest
from anthropic.types import MessageParam, TextBlock
from openai.types.chat import ChatCompletionUserMessageParam

from tests.replica.sim_server import serving

HELLO: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hello, how is the weather at sea today?"}]
GREETING: list[MessageParam] = [{"role": "user", "content": "hello, how is the weather at sea today?"}]


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with serving(max_model_len=2048) as (server, _):
        yield server.url


async def test_openai_chat_streamed_and_not(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, temperature=0)
        stream = await client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_completion_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        models = [model.id async for model in client.models.list()]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content != ""
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    details = chunks[-1].usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens  # the first request warmed it
    assert models == ["tiny"]


async def test_openai_several_answers_with_logprobs_streamed_and_not(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=6, n=2, logprobs=True, top_logprobs=2, presence_penalty=0.5
        )
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=6, n=2, logprobs=True, top_logprobs=2, stream=True
        )
        told: dict[int, str] = {0: "", 1: ""}
        async for chunk in stream:
            [grown] = chunk.choices
            if grown.logprobs is not None and grown.logprobs.content is not None:
                told[grown.index] += "".join(token.token for token in grown.logprobs.content)
        completion = await client.completions.create(model="tiny", prompt="once upon", max_tokens=6, logprobs=2)
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
        assert told[choice.index] == choice.message.content
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == completion.choices[0].text


async def test_openai_completion_streamed_and_not(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        whole = await client.completions.create(model="tiny", prompt="once upon", max_tokens=6)
        stream = await client.completions.create(model="tiny", prompt="once upon", max_tokens=6, stream=True)
        pieces = [chunk.choices[0].text async for chunk in stream]
    assert "".join(pieces) == whole.choices[0].text != ""


async def test_openai_errors_arrive_as_its_own_classes(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="other", messages=HELLO)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="tiny", messages=HELLO, n=0)
        assert refused.value.param == "n"


async def test_anthropic_messages_streamed_and_not(url: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
        whole = await client.messages.create(model="tiny", messages=GREETING, max_tokens=12, system="Be brief.")
        async with client.messages.stream(model="tiny", messages=GREETING, max_tokens=12, system="Be brief.") as stream:
            pieces = [piece async for piece in stream.text_stream]
            final = await stream.get_final_message()
    [block] = whole.content
    assert isinstance(block, TextBlock)
    assert "".join(pieces) == block.text != ""
    assert final.usage.output_tokens == whole.usage.output_tokens == 12
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.cache_read_input_tokens


async def test_anthropic_errors_arrive_as_its_own_classes(url: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError, match="other"):
            await client.messages.create(model="other", messages=GREETING, max_tokens=5)
        with pytest.raises(anthropic.BadRequestError, match="thinking"):
            await client.messages.create(
                model="tiny",
                messages=GREETING,
                max_tokens=2000,
                thinking={"type": "enabled", "budget_tokens": 1024},
            )
