"""A router over scripted replicas, and a client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from router.app import Router
from router.tracing import BeginTrace, trace_of
from shared.settings import RouterSettings
from tests.helpers import eventually
from tests.router.fake_replica import MODEL, FakeReplica


class Bench:
    """`replicas` fake ones, `router` over them, `client`."""

    def __init__(self, router: Router, replicas: list[FakeReplica], client: aiohttp.ClientSession) -> None:
        self.router = router
        self.replicas = replicas
        self.client = client

    @property
    def url(self) -> str:
        return self.router.url + "/v1/chat/completions"

    @property
    def seen(self) -> int:
        return sum(len(replica.seen) for replica in self.replicas)

    def replica_for(self, replica_id: str) -> FakeReplica:
        return next(replica for replica in self.replicas if replica.id == replica_id)

    async def settled(self) -> None:
        """Every counter of the router is back at zero."""
        await eventually(lambda: self.router.admission.in_flight == 0, what="nothing in flight")
        ledger = self.router.placement.ledger
        assert ledger.total_active == 0
        ledger.check_integrity()
        for replica in self.replicas:
            await eventually(lambda replica=replica: replica.active == 0, what="replica idle")  # type: ignore[misc]


def chat(stream: bool = True, text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": stream, **fields}


class BenchFactory:
    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.begin_trace: BeginTrace = trace_of

    async def __call__(self, count: int = 2, **settings: Any) -> Bench:
        replicas = [await self._stack.enter_async_context(FakeReplica()) for _ in range(count)]
        given: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "redis": None, "policy": "round-robin"}
        urls = tuple(replica.url for replica in replicas)
        router = Router(RouterSettings(replica=urls, **{**given, **settings}), begin_trace=self.begin_trace)
        await self._stack.enter_async_context(router)
        client = await self._stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        await eventually(
            lambda: all(router.health.reachable(r.id) and r.model for r in router.fleet), what="replicas probed"
        )
        return Bench(router, replicas, client)


@pytest.fixture
async def bench() -> AsyncIterator[BenchFactory]:
    async with AsyncExitStack() as stack:
        yield BenchFactory(stack)
