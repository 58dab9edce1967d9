"""Whatever the path and however it is answered: a request is counted from before it leaves until its last byte."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from shared.api import COMPLETIONS_PATH, COUNT_TOKENS_PATH, GENERATION_PATHS
from tests.helpers import eventually
from tests.router.conftest import BenchFactory, chat
from tests.router.fake_replica import open_stream

PASSED_THROUGH = ("/v1/embeddings", "/tokenize", COUNT_TOKENS_PATH)


@pytest.mark.parametrize("path", [*GENERATION_PATHS, *PASSED_THROUGH])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_counts_as_load_until_its_last_byte(bench: BenchFactory, path: str, stream: bool) -> None:
    may_begin, may_end = asyncio.Event(), asyncio.Event()

    async def slow(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        await may_begin.wait()
        response = await open_stream(request)
        await response.write(b"data: 1\n\n")
        await may_end.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    b = await bench(1)
    b.replicas[0].behave = slow

    def active() -> float:
        return b.router.placement.ledger.standing(b.replicas[0].id, 0.0).active

    body = chat(stream, max_tokens=4) | ({"prompt": "hello"} if path == COMPLETIONS_PATH else {})
    waiting = asyncio.create_task(b.client.post(b.router.url + path, json=body))
    await eventually(lambda: b.seen == 1, what="the request at the replica")
    assert (active(), b.router.admission.in_flight) == (1, 1)
    may_begin.set()
    async with await waiting as response:
        await response.content.readuntil(b"\n\n")
        assert (active(), b.router.admission.in_flight) == (1, 1)
        may_end.set()
        assert (await response.read()).endswith(b"[DONE]\n\n")
    await b.settled()
    assert active() == 0
