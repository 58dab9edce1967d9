"""The same server with the real engine in its seat."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from replica.backend import BackendError
from tests.replica.sim_server import CHAT, HELLO, serving

pytest.importorskip("torch", reason="torch is not installed: pip install 'warmroute[engine]'")


async def ask(client: aiohttp.ClientSession, **fields: Any) -> Any:
    async with client.post(CHAT, json=HELLO | fields) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def text_of(answer: Any) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


async def test_tiny_answers_hits_its_cache_and_repeats_a_seed() -> None:
    async with serving(engine="torch", threads=1, blocks=256) as (_, client):
        opening = {"role": "user", "content": "tell me about the river and the sea " * 8}
        first = await ask(client, messages=[opening], temperature=0, max_tokens=20)
        reply = {"role": "assistant", "content": text_of(first)}
        second = await ask(client, messages=[opening, reply, {"role": "user", "content": "more"}], temperature=0)
        computed = first["usage"]["total_tokens"] - 1
        # Less than 8 tokens of a block are not worth a copy.
        assert computed - 8 < second["usage"]["prompt_tokens_details"]["cached_tokens"] <= computed

        one, same, other = [text_of(await ask(client, seed=seed, max_tokens=20)) for seed in (1, 1, 2)]
        assert one == same != other

        ended = await ask(client, max_tokens=None, temperature=0)
        assert ended["choices"][0]["finish_reason"] == "stop"
        assert "<|" not in text_of(ended)


async def test_tiny_tells_how_likely_its_tokens_were_and_answers_several_times() -> None:
    async with serving(engine="torch", threads=1, blocks=256) as (_, client):
        greedy = await ask(client, temperature=0, logprobs=True, top_logprobs=5)
        for token in greedy["choices"][0]["logprobs"]["content"]:
            assert token["logprob"] == token["top_logprobs"][0]["logprob"] < 0
            logprobs = [rival["logprob"] for rival in token["top_logprobs"]]
            assert logprobs == sorted(logprobs, reverse=True)
            assert len(logprobs) == 5
            assert sum(map(math.exp, logprobs)) <= 1 + 1e-5

        several = [await ask(client, n=3, seed=7, max_tokens=20) for _ in range(2)]
        texts = [[choice["message"]["content"] for choice in answer["choices"]] for answer in several]
        assert texts[0] == texts[1]
        assert len(set(texts[0])) == 3
        assert text_of(await ask(client, seed=7, max_tokens=20)) == texts[0][0]

        [first] = greedy["choices"][0]["logprobs"]["content"][:1]
        path, body = "/tokenize", {"prompt": first["token"]}
        async with client.post(path, json=body) as response:
            [token_id] = (await response.json())["tokens"]
        other = await ask(client, temperature=0, logit_bias={str(token_id): -100})
        assert not text_of(other).startswith(first["token"])


async def test_a_directory_without_a_model_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=str(tmp_path)) as raised:
        async with serving(engine="torch", model=str(tmp_path)):
            pass
    assert "\n" not in str(raised.value)


async def test_rounded_blocks_of_a_session_never_become_what_all_tenants_share(tmp_path: Path) -> None:
    manual = {"role": "system", "content": "you answer for the harbour office of a small town " * 8}
    registered = tmp_path / "public.jsonl"
    registered.write_text(json.dumps({"messages": [manual]}))
    body = HELLO | {"messages": [manual, {"role": "user", "content": "when does the ferry leave " * 4}]}
    own = {"x-warmroute-tenant": "a"}
    async with serving(
        engine="torch", threads=1, blocks=256, public_prefixes=str(registered), sessions=str(tmp_path / "sessions")
    ) as (_, client):

        async def post(path: str, json: Any = None, headers: dict[str, str] = own) -> tuple[int, str]:
            async with client.post(path, json=json, headers=headers) as response:
                return response.status, await response.text()

        await post(CHAT, body)
        assert (await post("/sessions/s/save?kv=int8", body))[0] == 200
        await post("/reset_prefix_cache")
        status, refusal = await post("/sessions/s/restore")
        assert status == 409
        assert "all tenants share" in refusal
        await post(CHAT, HELLO | {"messages": [manual, *HELLO["messages"]]}, headers={})
        assert (await post("/sessions/s/restore"))[0] == 200
