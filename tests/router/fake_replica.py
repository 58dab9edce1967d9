"""A replica whose behaviour a test scripts: real sockets, real HTTP, no engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from aiohttp import web
from multidict import CIMultiDict

from replica.broken_http import HEAD_LIMITS

__all__ = ["Behaviour", "FakeReplica", "Seen", "answer", "refuse"]

Behaviour = Callable[[web.BaseRequest, bytes], Awaitable[web.StreamResponse]]

MODEL = "fake"


class Seen(NamedTuple):
    method: str
    path: str
    headers: CIMultiDict[str]
    body: bytes


class FakeReplica:
    """`behave` may be replaced at any time. Probes (`GET /health`, `/v1/models`) are always answered."""

    def __init__(self) -> None:
        self.behave: Behaviour = answer
        self.seen: list[Seen] = []
        self.active = 0
        self.cancelled = 0
        self.url = ""

    @property
    def id(self) -> str:
        return self.url.removeprefix("http://")

    async def __aenter__(self) -> FakeReplica:
        server = web.Server(
            self._handle,
            handler_cancellation=True,
            auto_decompress=False,
            request_factory=_big_request,
            **HEAD_LIMITS,  # type: ignore[arg-type]
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def stop(self) -> None:
        """Gone: connections are refused."""
        await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response()
        if request.method == "GET" and request.path == "/v1/models":
            return web.json_response({"data": [{"id": MODEL}]})
        self.active += 1
        try:
            body = await request.read()
            self.seen.append(Seen(request.method, request.rel_url.raw_path_qs, CIMultiDict(request.headers), body))
            return await self.behave(request, body)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1


async def answer(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
    """What is asked for: three chunks and `[DONE]`, or one document."""
    if not (body and json.loads(body).get("stream")):
        return web.json_response({"object": "answer"}, headers={"x-warmroute-cached-tokens": "7"})
    response = await open_stream(request)
    for number in range(3):
        await response.write(b'data: {"chunk": %d}\n\n' % number)
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def open_stream(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "x-warmroute-cached-tokens": "7"}
    )
    await response.prepare(request)
    return response


def refuse(status: int, **headers: str) -> Behaviour:
    async def behave(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        return web.Response(status=status, text=f'{{"refused": {status}}}', headers=headers)

    return behave


async def hang_up(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
    """Before a byte of answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def die_in_the_middle(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
    response = await open_stream(request)
    await response.write(b'data: {"chunk": 0}\n\n')
    assert request.transport is not None
    request.transport.abort()
    return response


def _big_request(message, payload, protocol, writer, task):  # type: ignore[no-untyped-def]
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=1 << 30)
