"""Asking a replica to save and restore sessions, and looking at what it saved."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from replica.engine import Engine
from replica.server import ReplicaServer
from tests.replica.sim_server import CHAT, HELLO

__all__ = ["STORY", "ask", "cached", "call", "engine_of", "file_of", "files_in", "process", "refused", "saved"]

STORY: dict[str, Any] = HELLO | {"messages": [{"role": "user", "content": "tell me of the river and the sea " * 40}]}
PROGRAM = "import sys, warmroute; sys.exit(warmroute.main(sys.argv[1:]))"

Client = aiohttp.ClientSession


async def call(client: Client, method: str, path: str, status: int = 200, **how: Any) -> Any:
    async with client.request(method, path, **how) as response:
        answer = await response.json()
        assert response.status == status, answer
        return answer


async def refused(client: Client, method: str, path: str, status: int, code: str, **how: Any) -> str:
    error = (await call(client, method, path, status, **how))["error"]
    assert error["code"] == code, error
    message: str = error["message"]
    return message


async def ask(client: Client, body: dict[str, Any] = STORY, tenant: str = "") -> tuple[int, int]:
    """Prompt tokens, and those of them that were cached."""
    usage = (await call(client, "POST", CHAT, json=body, headers={"x-warmroute-tenant": tenant}))["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


async def saved(client: Client, name: str = "one", tenant: str = "", body: dict[str, Any] = STORY) -> Any:
    await ask(client, body, tenant)
    return await call(client, "POST", f"/sessions/{name}/save", json=body, headers={"x-warmroute-tenant": tenant})


def file_of(directory: Path) -> Path:
    [path] = directory.glob("*/*.kv")
    return path


def files_in(directory: Path) -> list[str]:
    return [path.name for path in directory.rglob("*") if path.is_file() and path.name != ".lock"]


def cached(prompt_tokens: int) -> int:
    return (prompt_tokens - 1) // 16 * 16


@contextlib.asynccontextmanager
async def process(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Client]]:
    """A replica in a process of its own, by the command line."""
    command = [sys.executable, "-c", PROGRAM, "replica", "--port", "0", "--log-level", "warning", *flags]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert child.stdout is not None
        line = (await asyncio.wait_for(child.stdout.readline(), 60)).decode()
        assert line.startswith("ready http://")
        async with aiohttp.ClientSession(line.split()[1]) as client:
            yield child, client
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


def engine_of(server: ReplicaServer) -> Engine:
    assert server.service is not None
    return server.service.engine
