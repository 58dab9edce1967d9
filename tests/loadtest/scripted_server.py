"""A chat server that says what a test wants, on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

__all__ = ["frames", "serving", "stream"]

Reply = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(reply: Reply) -> AsyncIterator[str]:
    """The base URL of a server whose chat completions are `reply`'s."""

    async def chat(request: web.Request) -> web.StreamResponse:
        return await reply(request, await request.json())

    application = web.Application()
    application.router.add_post("/v1/chat/completions", chat)
    server = TestServer(application)
    await server.start_server()
    try:
        yield str(server.make_url("/")).rstrip("/")
    finally:
        await server.close()


def frames(*words: str, prompt_tokens: int = 40, cached_tokens: int = 16) -> list[bytes]:
    """The frames of a whole answer: role, words, finish, usage, end."""
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    deltas = [{"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]} for word in words]
    finish = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    usage = {
        "choices": [],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(words),
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        },
    }
    documents = [role, *deltas, finish, usage]
    return [*(b"data: " + json.dumps(document).encode() + b"\n\n" for document in documents), b"data: [DONE]\n\n"]


async def stream(
    request: web.Request, pieces: list[bytes], *, headers: dict[str, str] | None = None, pause_seconds: float = 0.0
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream", **(headers or {})})
    await response.prepare(request)
    for piece in pieces:
        await asyncio.sleep(pause_seconds)
        await response.write(piece)
    await response.write_eof()
    return response
