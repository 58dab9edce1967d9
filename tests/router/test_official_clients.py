"""The official clients understand what the router says when something goes wrong."""

from __future__ import annotations

import anthropic
import openai
import pytest

from tests.router.conftest import BenchFactory
from tests.router.fake_replica import MODEL, die_in_the_middle, hang_up


async def test_openai_raises_its_own_errors(bench: BenchFactory) -> None:
    b = await bench(1)
    async with openai.AsyncOpenAI(base_url=b.router.url + "/v1", api_key="x", max_retries=0) as client:
        ask = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
        with pytest.raises(openai.NotFoundError, match="not served here"):
            await client.chat.completions.create(**{**ask, "model": "other"})  # type: ignore[call-overload]
        b.replicas[0].behave = hang_up
        with pytest.raises(openai.InternalServerError, match="did not answer"):
            await client.chat.completions.create(**ask)  # type: ignore[call-overload]
        b.replicas[0].behave = die_in_the_middle
        with pytest.raises(openai.APIError, match="failed while answering"):
            async for _ in await client.chat.completions.create(**ask, stream=True):  # type: ignore[call-overload]
                pass


async def test_anthropic_raises_its_own_errors(bench: BenchFactory) -> None:
    b = await bench(1)
    async with anthropic.AsyncAnthropic(base_url=b.router.url, api_key="x", max_retries=0) as client:
        ask = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
        with pytest.raises(anthropic.NotFoundError, match="not served here"):
            await client.messages.create(**{**ask, "model": "other"})  # type: ignore[call-overload]
        b.router.fleet.drain(b.replicas[0].id)
        with pytest.raises(anthropic.InternalServerError, match="is draining"):
            await client.messages.create(**ask)  # type: ignore[call-overload]
        b.router.fleet.drain(b.replicas[0].id, False)
        b.replicas[0].behave = die_in_the_middle
        with pytest.raises(anthropic.APIError, match="failed while answering"):
            async for _ in await client.messages.create(**ask, stream=True):  # type: ignore[call-overload]
                pass
