"""What `GET /cache` shows, and to whom."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aiohttp
import pytest
import redis

from replica.block_moves import carry_out
from replica.cache_view import CacheDescription, describe
from replica.prefix_cache import PrefixCache
from replica.scheduler import Counters
from shared.blocks import BlockKey
from tests.helpers import eventually
from tests.replica.pool_runner import PoolRunner, make_sequence
from tests.replica.sim_server import CHAT, HELLO, serving

SIZE = 4


def remember(cache: PrefixCache, prompt: list[int], **more: Any) -> None:
    sequence = make_sequence(prompt, **more)
    assert cache.allocate(sequence, cache.match(sequence))
    sequence.computed_tokens = len(prompt)
    cache.register(sequence)
    cache.free(sequence)
    carry_out(PoolRunner(cache.num_blocks, SIZE, host_blocks=cache.host_blocks), cache.take_moves())


def look(cache: PrefixCache, most_nodes: int = 100, *, with_tokens: bool = False) -> CacheDescription:
    return describe(cache, Counters(), most_nodes, with_tokens)


def shape(description: CacheDescription) -> list[tuple[int | None, int, int, str]]:
    return [(node.parent, node.blocks, node.tokens, node.tier) for node in description.tree]


def test_a_run_without_a_branch_is_one_node_and_branches_are_its_children() -> None:
    cache = PrefixCache(64, SIZE, finer=True)
    system = list(range(12))
    remember(cache, [*system, *range(100, 108)])
    remember(cache, [*system, *range(200, 207)])
    described = look(cache)
    assert shape(described) == [(None, 3, 12, "device"), (0, 2, 8, "device"), (0, 1, 4, "device"), (2, 1, 3, "device")]
    assert [bool(node.key) for node in described.tree] == [True, True, True, False]
    assert (described.held_blocks, described.hidden_blocks) == (6, 0)


def test_tenants_are_trees_of_their_own_and_blocks_in_use_are_told_apart() -> None:
    cache = PrefixCache(64, SIZE)
    remember(cache, list(range(8)))
    remember(cache, list(range(8)), root=BlockKey(b"t" * 16))
    user = make_sequence([*range(4), 9])
    cache.allocate(user, cache.match(user))
    assert shape(look(cache)) == [(None, 1, 4, "device"), (None, 2, 8, "device"), (0, 1, 4, "device")]
    assert [node.used for node in look(cache).tree] == [True, False, False]


def test_what_moved_to_host_memory_hangs_where_it_belongs() -> None:
    cache = PrefixCache(4, SIZE, host_blocks=8)
    remember(cache, list(range(16)))
    remember(cache, list(range(100, 108)))
    assert shape(look(cache)) == [(None, 2, 8, "device"), (None, 2, 8, "device"), (0, 2, 8, "host")]
    remember(cache, list(range(200, 216)))
    tree = shape(look(cache))
    assert sorted(tree[1:], key=str) == [(None, 2, 8, "host"), (None, 4, 16, "host")]
    assert tree[0] == (None, 4, 16, "device")
    described = look(cache)
    assert (described.host_held_blocks, len(described.host_keys)) == (6, 6)
    assert described.evictions == {"to_host": 6, "host_capacity": 0}


def test_the_tree_is_cut_where_it_is_asked_to_be_and_says_what_it_hides() -> None:
    cache = PrefixCache(64, SIZE)
    for first in range(5):
        remember(cache, [7, 7, 7, 7, first, 0, 0, 0])
    assert [len(look(cache, most).tree) for most in (0, 1, 3, 100)] == [0, 1, 3, 6]
    assert [look(cache, most).hidden_blocks for most in (0, 1, 3, 100)] == [6, 5, 3, 0]


def test_tokens_are_shown_only_when_asked_for_and_only_the_first() -> None:
    cache = PrefixCache(64, SIZE)
    remember(cache, list(range(100)))
    assert look(cache).tree[0].token_ids == []
    assert look(cache, with_tokens=True).tree[0].token_ids == list(range(64))


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with serving(admin_key="hunter2") as (_, client):
        async with client.post(CHAT, json=HELLO | {"messages": [{"role": "user", "content": "a secret " * 20}]}):
            pass
        yield client


async def test_text_is_shown_to_the_admin_alone(client: aiohttp.ClientSession) -> None:
    async with client.get("/cache") as response:
        body = await response.text()
        assert response.status == 200
    assert "secret" not in body
    assert "token_ids" not in body
    async with client.get("/cache", headers={"Authorization": "Bearer hunter2"}) as response:
        assert "a secret a secret" in (await response.json())["tree"][0]["text"]
    async with client.get("/cache", headers={"Authorization": "Bearer wrong"}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (401, "invalid_admin_key")


async def test_without_an_admin_key_nobody_sees_text() -> None:
    async with serving() as (_, client):
        async with client.post(CHAT, json=HELLO | {"messages": [{"role": "user", "content": "a secret " * 20}]}):
            pass
        async with client.get("/cache", headers={"Authorization": "Bearer "}) as response:
            body = await response.text()
            assert response.status == 200
        assert "secret" not in body


@pytest.mark.parametrize(
    ("path", "wish"),
    [
        (CHAT, {"prompt_cache_retention": "24h"}),
        ("/v1/messages", {"cache_control": {"type": "ephemeral", "ttl": "1h"}}),
    ],
)
async def test_a_wish_to_keep_a_prompt_reaches_the_cache(path: str, wish: dict[str, Any]) -> None:
    async with serving(retained_share=0.01) as (_, client):
        body = HELLO | {"messages": [{"role": "user", "content": "keep me " * 100}]}
        for asked, retained in ((body, 0), (body | wish, 5)):
            async with client.post(path, json=asked) as response:
                assert response.status == 200
            async with client.get("/cache") as response:
                described = await response.json()
            assert described["retained_blocks"] == retained
        assert [node.get("retained", False) for node in described["tree"]] == [True, False]


@pytest.mark.parametrize("nodes", ["-1", "2001", "ten", "", "9" * 5_000])
async def test_absurd_numbers_of_nodes_are_refused(client: aiohttp.ClientSession, nodes: str) -> None:
    async with client.get("/cache", params={"nodes": nodes}) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "nodes")


async def test_as_many_nodes_as_asked_for(client: aiohttp.ClientSession) -> None:
    async with client.get("/cache", params={"nodes": "0"}) as response:
        described = await response.json()
    assert described["tree"] == []
    assert described["hidden_blocks"] == described["held_blocks"] > 0


def _stands_in(state: Any, name: str, wanted: set[bytes]) -> bool:
    return bool(state.smembers(name) == wanted)


async def test_a_replica_publishes_both_tiers_and_brings_back_what_is_asked_for_again(redis_url: str) -> None:
    contents = (f"{word} " * 60 for word in ("river", "stone", "bird"))
    bodies = [HELLO | {"messages": [{"role": "user", "content": content}]} for content in contents]
    with redis.Redis.from_url(redis_url) as state:
        async with serving(redis=redis_url, id="r1", blocks=12, host_blocks=64) as (_, client):
            for body in bodies:
                async with client.post(CHAT, json=body) as response:
                    assert response.status == 200
            async with client.get("/cache") as response:
                described = await response.json()
            assert described["host_held_blocks"] > 0
            for name, keys in (("blocks", described["keys"]), ("host", described["host_keys"])):
                wanted = {bytes.fromhex(key) for key in keys}
                await eventually(partial(_stands_in, state, f"warmroute:{{default}}:{name}:r1", wanted))
            async with client.post(CHAT, json=bodies[0]) as response:
                again = await response.json()
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
            async with client.get("/cache") as response:
                assert (await response.json())["counters"]["onloaded_tokens"] > 0
            async with client.post("/reset_prefix_cache") as response:
                assert response.status == 200
            await eventually(lambda: not state.exists("warmroute:{default}:host:r1", "warmroute:{default}:blocks:r1"))
