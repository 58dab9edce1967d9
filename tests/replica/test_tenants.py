"""Tenants share the machine and nothing else: not a block, not a published key."""

from __future__ import annotations

from typing import Any

import aiohttp
import redis

from tests.helpers import eventually
from tests.replica.sim_server import CHAT, HELLO, serving

BODY: dict[str, Any] = HELLO | {"messages": [{"role": "user", "content": "a secret between us " * 40}]}


async def ask(client: aiohttp.ClientSession, tenant: str) -> Any:
    async with client.post(CHAT, json=BODY, headers={"x-warmroute-tenant": tenant}) as response:
        assert response.status == 200
        return (await response.json())["usage"]


async def test_the_same_prompt_of_two_tenants_publishes_keys_with_nothing_in_common(redis_url: str) -> None:
    async with serving(redis=redis_url, id="r1", secret="s3cret") as (_, client):
        published: dict[str, set[bytes]] = {}
        with redis.Redis.from_url(redis_url) as server:

            def keys() -> set[bytes]:
                return set(server.smembers("warmroute:{default}:blocks:r1"))

            for tenant in ("a", "b", "a"):
                usage = await ask(client, tenant)
                full_blocks = (usage["total_tokens"] - 1) // 16
                await eventually(lambda count=full_blocks: len(keys()) == count, what="all published")  # type: ignore[misc]
                before = published.setdefault(tenant, keys())
                assert before == keys()
                async with client.post("/reset_prefix_cache") as response:
                    assert response.status == 200
                await eventually(lambda: not keys(), what="all withdrawn")
    assert len(published["a"]) == len(published["b"]) >= 10
    assert not published["a"] & published["b"]


async def test_what_one_tenant_warmed_is_cold_for_another_and_no_names_run_together() -> None:
    async with serving() as (_, client):
        await ask(client, "a")
        for stranger in ("b", "", "A", "a|", "aa"):
            assert (await ask(client, stranger))["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await ask(client, "a"))["prompt_tokens_details"]["cached_tokens"] > 100
