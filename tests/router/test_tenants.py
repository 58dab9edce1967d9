"""Tenants by their API keys, from the router to real replicas: each finds its own cache and nobody else's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.server import ReplicaServer
from replica.tiny_tokenizer import tiny_bundle
from router.app import Router
from router.prompt_reader import PromptReader
from shared.api import CHAT_PATH, parse_routing
from shared.blocks import block_keys, pack_tokens, published_key
from shared.key_memo import Run
from shared.prompts import EncodedPrompt, PromptEncoder
from shared.public_prefixes import PublicPrefixes
from shared.settings import ReplicaSettings, RouterSettings
from tests.helpers import eventually

KEYS = {"acme": "sk-acme-0123456789", "globex": "sk-globex-0123456789"}
STORY = " ".join(f"chapter {number} went on" for number in range(80))


class Tenants:
    def __init__(self, router: Router, client: aiohttp.ClientSession) -> None:
        self.router = router
        self._client = client

    async def ask(self, tenant: str, path: str = CHAT_PATH) -> tuple[dict[str, Any], dict[str, str]]:
        body = {"model": "tiny", "messages": [{"role": "user", "content": STORY}], "max_tokens": 4}
        given = {"x-api-key": KEYS[tenant]}
        async with self._client.post(self.router.url + path, json=body, headers=given) as response:
            assert response.status == 200, await response.text()
            return await response.json(), {name.lower(): value for name, value in response.headers.items()}

    async def counts(self, tenant: str) -> tuple[int, int]:
        """Predicted and cached tokens."""
        _, headers = await self.ask(tenant)
        return int(headers["x-warmroute-predicted-tokens"]), int(headers["x-warmroute-cached-tokens"])

    async def published(self, blocks: int) -> None:
        await eventually(lambda: self.router.index.held("one").device.blocks == blocks, what=f"{blocks} blocks known")


_ENCODER, _SERIALS = PromptEncoder(tiny_bundle()), count(10**9)


PUBLIC = STORY[: len(STORY) // 2]
_BLOCKS, _PUBLIC_BLOCKS = 34, 16
"""That the prompt fills, and those of them that are public where an operator says so."""


@asynccontextmanager
async def fleet(redis_url: str, folder: Path, secret: str = "", public: str | None = None) -> AsyncIterator[Tenants]:
    """A router and one replica."""
    file = folder / "keys.toml"
    file.write_text("".join(f'[[key]]\nkey = "{key}"\ntenant = "{tenant}"\n' for tenant, key in KEYS.items()))
    shared: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "redis": redis_url,
        "secret": secret,
        "public_prefixes": public,
    }
    async with AsyncExitStack() as stack:
        server = ReplicaServer(ReplicaSettings(id="one", engine="sim", blocks=1024, sim_base_seconds=0.001, **shared))
        await server.listen()
        stack.push_async_callback(server.stop, 0)
        await server.load()
        router = await stack.enter_async_context(Router(RouterSettings(api_keys=str(file), **shared)))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        await eventually(lambda: router.view.step == "exact" and len(router.fleet) == 1, what="exact view")
        await eventually(lambda: router.fleet.namespaces("tiny")[0].encoder, what="tokenizer fetched")
        yield Tenants(router, client)


@pytest.fixture(params=["", "a-secret-of-the-cluster"])
async def tenants(redis_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Tenants]:
    async with fleet(redis_url, tmp_path, request.param) as started:
        yield started


async def test_a_tenant_finds_its_own_cache_and_nobody_elses(tenants: Tenants) -> None:
    assert await tenants.counts("acme") == (0, 0)
    await tenants.published(_BLOCKS)
    assert await tenants.counts("globex") == (0, 0)
    await tenants.published(2 * _BLOCKS)
    for tenant in KEYS:
        assert await tenants.counts(tenant) == (16 * _BLOCKS, 16 * _BLOCKS)


async def test_a_dry_run_shows_a_tenant_its_own_cache_alone(tenants: Tenants) -> None:
    await tenants.ask("acme")
    await tenants.published(_BLOCKS)
    own, _ = await tenants.ask("acme", "/route")
    other, _ = await tenants.ask("globex", "/route")
    assert own["chosen"]["held_tokens"] == 16 * _BLOCKS
    assert other["chosen"]["held_tokens"] == other["chosen"]["matched_tokens"] == 0


async def test_what_is_public_is_predicted_for_every_tenant_as_replicas_count_it(
    redis_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "public.jsonl"
    file.write_bytes(msgspec.json.encode({"messages": [{"role": "user", "content": PUBLIC}]}))
    async with fleet(redis_url, tmp_path, "a-secret-of-the-cluster", str(file)) as tenants:
        assert await tenants.counts("acme") == (0, 0)
        await tenants.published(_BLOCKS)
        assert await tenants.counts("globex") == (16 * _PUBLIC_BLOCKS, 16 * _PUBLIC_BLOCKS)
        await tenants.published(2 * _BLOCKS - _PUBLIC_BLOCKS)
        for tenant in KEYS:
            assert await tenants.counts(tenant) == (16 * _BLOCKS, 16 * _BLOCKS)


def test_without_a_tokenizer_tenants_share_nothing_either() -> None:
    routing = parse_routing("/v1/completions", b'{"model":"m","prompt":"%b"}' % (b"word " * 200))
    everyone, acme, globex = (set(PromptReader.approximate(routing, tenant).keys) for tenant in ("", "acme", "globex"))
    assert len(acme) == len(globex) == len(everyone) == 3
    assert not acme & globex
    assert not acme & everyone


@given(
    runs=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), max_size=8),
    public_tokens=st.integers(0, 80),
    block_size=st.integers(1, 8),
)
def test_keys_branch_where_what_is_public_ends_however_the_prompt_is_cut(
    runs: list[list[int]], public_tokens: int, block_size: int
) -> None:
    prompt = EncodedPrompt(tuple(Run(pack_tokens(run), next(_SERIALS)) for run in runs), sum(len(run) for run in runs))
    tokens = prompt.token_ids
    namespace = PublicPrefixes("model", block_size, "", [tokens[:public_tokens]]).namespace("acme", tokens)
    blocks = 0 if namespace.branch is None else namespace.branch.blocks
    expected = block_keys(namespace.root, tokens[: blocks * block_size] if blocks else tokens, block_size)
    if namespace.branch is not None:
        expected += block_keys(namespace.branch.root, tokens[blocks * block_size :], block_size)
    assert blocks == min(public_tokens, len(tokens)) // block_size
    for _ in range(2):  # computed, and remembered
        assert _ENCODER.keys_in(prompt, namespace, block_size) == [published_key(key) for key in expected]
