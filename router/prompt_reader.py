"""A parsed request -> what placement needs: its tokens counted and its block keys.

With the model's encoder the keys are exact, the engine's own. Without one (an engine that publishes no tokenizer) the
prompt's text is cut into blocks of characters and chained the same way: good for telling like from like, no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import xxhash

from router.policies.base import Request
from shared.api import ApiError, RoutingFields
from shared.blocks import BlockKey, PublishedKey, published_key
from shared.prompts import ChatPrompt, EncodedPrompt, PromptEncoder, PromptError, PromptInput, TextPrompt
from shared.public_prefixes import Namespace

__all__ = ["PromptReader"]

# About 5 ms of tokenizing: more would hold up everyone else on the loop.
_LONG_TEXT_CHARACTERS = 15_000
_RUNS_AT_ONCE = 12
"""Whose keys are computed without a pause: about a millisecond of work."""
_CHARACTERS_PER_TOKEN = 4
_TEXT_BLOCK_BYTES = 256
_AFFINITY_BYTES = 1024

_encode_json = msgspec.json.Encoder().encode


class PromptReader:
    """Long texts are tokenized in `executor`, where they hold up nobody."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor

    async def exact(
        self,
        routing: RoutingFields,
        encoder: PromptEncoder,
        root: BlockKey,
        block_size: int,
        begins: Callable[[Sequence[int]], Namespace] | None = None,
    ) -> Request:
        """`begins` tells where keys begin if not all at `root`. Raises ApiError, as `encode` does."""
        encoded = await self.encode(encoder, routing.prompt)
        namespace = Namespace(root) if begins is None else begins(encoded.token_ids)
        for opening in encoded.openings(_RUNS_AT_ONCE):  # whose keys are remembered
            encoder.keys_in(opening, namespace, block_size)
            await asyncio.sleep(0)
        keys = encoder.keys_in(encoded, namespace, block_size)
        affinity = b"" if keys else _digest(encoded.token_ids)
        return _request(routing, encoded.token_count, keys, block_size, affinity)

    async def encode(self, encoder: PromptEncoder, prompt: PromptInput) -> EncodedPrompt:
        """Raises ApiError 400 where the prompt cannot be rendered or tokenized: the engine would refuse it too."""
        try:
            prepared = encoder.prepare(prompt)
            if prepared.unseen_characters > _LONG_TEXT_CHARACTERS:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._executor, encoder.tokenize_missing, prepared)
            else:
                encoder.tokenize_missing(prepared)
            return encoder.finish(prepared)
        except PromptError as error:
            raise ApiError(400, "invalid_prompt", error.message, param=error.param) from None

    @staticmethod
    def approximate(routing: RoutingFields, tenant: str = "") -> Request:
        """By the prompt's characters; tenants share nothing, as if each had a model of its own."""
        text = _text(routing.prompt)
        namespace = f"{routing.model}\0{tenant}" if tenant else routing.model
        key = xxhash.xxh3_128_digest(namespace.encode(errors="replace"))
        keys = []
        for start in range(0, len(text) - _TEXT_BLOCK_BYTES + 1, _TEXT_BLOCK_BYTES):
            key = xxhash.xxh3_128_digest(key + text[start : start + _TEXT_BLOCK_BYTES])
            keys.append(published_key(BlockKey(key)))
        affinity = xxhash.xxh3_64_digest(text[:_AFFINITY_BYTES])
        block_size = _TEXT_BLOCK_BYTES // _CHARACTERS_PER_TOKEN
        return _request(routing, max(1, len(text) // _CHARACTERS_PER_TOKEN), keys, block_size, affinity)


def _request(
    routing: RoutingFields, tokens: int, keys: list[PublishedKey], block_size: int, affinity: bytes
) -> Request:
    return Request(
        prompt_tokens=tokens,
        keys=keys,
        block_size=block_size,
        affinity=affinity,
        session=_session(routing.session),
        streamed=routing.stream,
    )


def _session(name: str) -> bytes:
    return xxhash.xxh3_64_digest(name.encode(errors="replace")) if name else b""


def _text(prompt: PromptInput) -> bytes:
    if isinstance(prompt, TextPrompt):
        return prompt.text.encode(errors="replace")
    parts: Sequence[int] | Sequence[Mapping[str, Any]] = (
        prompt.messages if isinstance(prompt, ChatPrompt) else prompt.ids
    )
    return _encode_json(parts)


def _digest(token_ids: Sequence[int]) -> bytes:
    return xxhash.xxh3_64_digest(_encode_json(token_ids))
