"""A whole replica with the simulated engine, in the test's own event loop, on a real port."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from replica.server import ReplicaServer
from shared.settings import ReplicaSettings

__all__ = ["CHAT", "HELLO", "FAST", "serving"]

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}

FAST: dict[str, Any] = {
    "engine": "sim",
    "port": 0,
    "blocks": 512,
    "sim_base_seconds": 0.001,
    "sim_per_token_seconds": 0.0,
    "sim_per_token_context_seconds": 0.0,
    "sim_per_decode_seconds": 0.0,
}


@contextlib.asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[ReplicaServer, aiohttp.ClientSession]]:
    """The server, ready, and a client whose base URL it is."""
    server = ReplicaServer(ReplicaSettings(**(FAST | settings)))
    await server.listen()
    try:
        await server.load()
        async with aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0)) as client:
            yield server, client
    finally:
        await server.stop(grace_seconds=0)
