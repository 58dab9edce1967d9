"""Prompts become tokens and keys: the engine's own with its tokenizer, blocks of text without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from replica.tiny_tokenizer import tiny_bundle
from router.prompt_reader import PromptReader
from shared.api import CHAT_PATH, COMPLETIONS_PATH, ApiError, RoutingFields, parse_routing
from shared.blocks import block_keys, namespace_root, published_key
from shared.prompts import PromptEncoder

ROOT = namespace_root("fingerprint")


@pytest.fixture
def reader() -> Iterator[PromptReader]:
    with ThreadPoolExecutor(1) as executor:
        yield PromptReader(executor)


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(tiny_bundle())


def chat(*texts: str, **fields: object) -> RoutingFields:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return parse_routing(CHAT_PATH, msgspec.json.encode({"model": "tiny", "messages": messages, **fields}))


def completion(prompt: object) -> RoutingFields:
    return parse_routing(COMPLETIONS_PATH, msgspec.json.encode({"model": "tiny", "prompt": prompt}))


async def test_the_keys_are_those_of_the_engines_tokens(reader: PromptReader, encoder: PromptEncoder) -> None:
    routing = chat("Once upon a time " * 40, stream=True)
    asked = await reader.exact(routing, encoder, ROOT, 16)
    tokens = PromptEncoder(tiny_bundle()).encode(routing.prompt).token_ids
    assert asked.prompt_tokens == len(tokens)
    assert asked.keys == [published_key(key) for key in block_keys(ROOT, tokens, 16)]
    assert asked.streamed


async def test_prompts_shorter_than_a_block_are_told_apart(reader: PromptReader, encoder: PromptEncoder) -> None:
    one, two = [await reader.exact(completion(text), encoder, ROOT, 16) for text in ("a", "b")]
    assert not one.keys
    assert one.affinity
    assert one.affinity != two.affinity


async def test_a_prompt_that_cannot_be_tokenized_is_refused_as_the_engine_would(
    reader: PromptReader, encoder: PromptEncoder
) -> None:
    with pytest.raises(ApiError) as refusal:
        await reader.exact(completion([10**9]), encoder, ROOT, 16)
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_prompt")


async def test_a_long_unseen_text_is_tokenized_off_the_loop(reader: PromptReader, encoder: PromptEncoder) -> None:
    longest_pause, done = 0.0, False

    async def watch() -> None:
        nonlocal longest_pause
        while not done:
            begun = time.monotonic()
            await asyncio.sleep(0.001)
            longest_pause = max(longest_pause, time.monotonic() - begun)

    watching = asyncio.create_task(watch())
    text = " ".join(f"word{number}" for number in range(60_000))
    await asyncio.sleep(0.01)  # it is watching now
    begun = time.monotonic()
    asked = await reader.exact(completion(text), encoder, ROOT, 16)
    taken = time.monotonic() - begun
    done = True
    await watching
    assert asked.prompt_tokens > 60_000
    assert longest_pause < 0.25 * taken


def test_without_a_tokenizer_text_that_begins_alike_shares_its_first_keys(reader: PromptReader) -> None:
    opening = "You are helpful. " * 60
    one, two = reader.approximate(chat(opening + "Alpha" * 100)), reader.approximate(chat(opening + "Beta" * 120))
    shared = sum(left == right for left, right in zip(one.keys, two.keys, strict=False))
    assert shared == (len(opening) + 20) // 256
    assert one.keys[shared:] != two.keys[shared:]
    assert one.block_size * len(one.keys) <= one.prompt_tokens
    elsewhere = reader.approximate(chat(opening, model="other"))
    assert not set(elsewhere.keys) & set(one.keys)


def test_a_growing_conversation_keeps_its_keys(reader: PromptReader) -> None:
    before = reader.approximate(chat("x" * 1000, "y" * 1000))
    after = reader.approximate(chat("x" * 1000, "y" * 1000, "z" * 1000))
    assert after.keys[: len(before.keys) - 1] == before.keys[:-1]
