"""Tenants share the machine and nothing else: not a block, not a published key."""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis

from shared.api import parse_chat
from shared.blocks import namespace_root
from shared.public_prompts import PublicPromptsError
from tests.helpers import eventually
from tests.replica.sim_server import CHAT, HELLO, serving

BODY: dict[str, Any] = HELLO | {"messages": [{"role": "user", "content": "a secret between us " * 40}]}


async def ask(client: aiohttp.ClientSession, tenant: str) -> Any:
    async with client.post(CHAT, json=BODY, headers={"x-warmroute-tenant": tenant}) as response:
        assert response.status == 200
        return (await response.json())["usage"]


async def test_the_same_prompt_of_two_tenants_publishes_keys_with_nothing_in_common(redis_url: str) -> None:
    async with serving(redis=redis_url, id="r1", secret="s3cret", admin_key="an operator's") as (_, client):
        client.headers["x-api-key"] = "an operator's"
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


async def test_a_tenants_name_may_be_any_bytes() -> None:
    async with serving() as (server, _):

        async def cached(tenant: bytes) -> int:
            body = json.dumps(BODY).encode()
            reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").rsplit(":", 1))
            head = b"Host: x\r\nConnection: close\r\nContent-Length: %d\r\nx-warmroute-tenant: %b" % (len(body), tenant)
            writer.write(b"POST %b HTTP/1.1\r\n%b\r\n\r\n%b" % (CHAT.encode(), head, body))
            status, _, answer = (await reader.read()).partition(b"\r\n")
            writer.close()
            assert status == b"HTTP/1.1 200 OK"
            return int(json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [await cached(tenant) for tenant in (b"\xff", b"\xfe", b"\xc3\xbf", b"")] == [0, 0, 0, 0]
        assert await cached(b"\xff") > 100


MANUAL = "You answer for the harbour office of a small town by the sea. " * 20


def question(text: str) -> dict[str, Any]:
    return HELLO | {"messages": [{"role": "system", "content": MANUAL}, {"role": "user", "content": text}]}


async def test_a_registered_beginning_is_computed_once_for_all_tenants_and_what_follows_by_each(
    tmp_path: Path, redis_url: str
) -> None:
    registered = tmp_path / "public.jsonl"
    manual = {"messages": [{"role": "system", "content": MANUAL}]}
    registered.write_text(f"# shared by all\n\n{json.dumps(manual)}\n")
    async with serving(public_prefixes=str(registered), redis=redis_url, id="r1") as (server, client):

        async def cached(tenant: str, text: str) -> int:
            async with client.post(CHAT, json=question(text), headers={"x-warmroute-tenant": tenant}) as response:
                return int(response.headers["x-warmroute-cached-tokens"])

        async with client.post("/tokenize", json=manual | {"add_generation_prompt": False}) as response:
            public_tokens = (await response.json())["count"] // 16 * 16
        assert public_tokens > 100
        story = "when does the ferry leave and what does it cost to take a boat " * 5
        assert await cached("a", story) == 0
        assert await cached("b", story) == public_tokens
        assert await cached("b", story) > public_tokens + 16
        assert await cached("", "hello") == public_tokens

        # A router, which asks without a tenant, finds the same beginning among the published keys.
        assert server.service is not None
        encoder, root = server.service.model.encoder, namespace_root(server.service.model.fingerprint)
        public = encoder.keys(
            encoder.encode(parse_chat(json.dumps(question("hello")).encode()).routing.prompt), root, 16
        )
        with redis.Redis.from_url(redis_url) as plain:
            await eventually(
                lambda: all(
                    plain.sismember("warmroute:{default}:blocks:r1", struct.pack("<Q", key))
                    for key in public[: public_tokens // 16]
                )
            )


async def test_without_registration_nothing_is_shared_however_alike() -> None:
    async with serving() as (_, client):
        for tenant in ("a", "b"):
            async with client.post(CHAT, json=question("x"), headers={"x-warmroute-tenant": tenant}) as response:
                assert response.headers["x-warmroute-cached-tokens"] == "0"


@pytest.mark.parametrize("text", ['{"messages": 5}', "nonsense", '{"prompt": ""}'])
async def test_a_file_that_cannot_be_used_is_one_clear_line_that_names_file_and_line(tmp_path: Path, text: str) -> None:
    registered = tmp_path / "public.jsonl"
    registered.write_text(f'{{"prompt": "fine"}}\n{text}\n')
    with pytest.raises(PublicPromptsError, match=r".*public\.jsonl, line 2: ") as raised:
        async with serving(public_prefixes=str(registered)):
            pass
    assert "\n" not in str(raised.value)


async def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(PublicPromptsError, match="No such file"):
        async with serving(public_prefixes=str(tmp_path / "none")):
            pass


@pytest.mark.parametrize("tenant", ["a", ""])
async def test_a_session_behind_a_registered_beginning_comes_back_for_its_tenant(tmp_path: Path, tenant: str) -> None:
    registered = tmp_path / "public.jsonl"
    registered.write_text(json.dumps({"messages": [{"role": "system", "content": MANUAL}]}))
    body, whose = question("when does the ferry leave " * 5), {"x-warmroute-tenant": tenant}
    async with serving(public_prefixes=str(registered), sessions=str(tmp_path / "sessions")) as (_, client):

        async def cached(whose: dict[str, str]) -> int:
            async with client.post(CHAT, json=body, headers=whose) as response:
                return int(response.headers["x-warmroute-cached-tokens"])

        async def post(path: str, json: Any = None) -> int:
            async with client.post(path, json=json, headers=whose) as response:
                return response.status

        await cached(whose)
        warm = await cached(whose)
        assert await post("/sessions/s/save", body) == 200
        assert await post("/reset_prefix_cache") == 200
        assert await post("/sessions/s/restore") == 200
        assert await cached(whose) == warm
        public = await cached({"x-warmroute-tenant": "stranger"})
        assert 100 < public < warm - 16
