"""Sessions over HTTP, with the simulated engine: whose they are, and that they survive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis

from replica import sessions
from tests.helpers import eventually
from tests.replica.session_client import STORY, ask, cached, call, engine_of, file_of, files_in, process, refused, saved
from tests.replica.sim_server import CHAT, HELLO, serving


async def test_a_session_survives_kill_9_and_resumes_without_prefill(tmp_path: Path) -> None:
    flags = ("--engine", "sim", "--sessions", str(tmp_path))
    async with process(*flags) as (child, client):
        answer = await saved(client)
        prompt_tokens = answer["prompt_tokens"]
        assert (answer["name"], answer["kv"], answer["refused"]) == ("one", "raw", None)
        assert answer["tokens"] == 16 * answer["blocks"] == prompt_tokens // 16 * 16
        assert answer["file_bytes"] == file_of(tmp_path).stat().st_size
        child.send_signal(signal.SIGKILL)
        await child.wait()
    async with process(*flags) as (_, client):
        [listed] = (await call(client, "GET", "/sessions"))["sessions"]
        assert listed == {key: value for key, value in answer.items() if key != "prompt_tokens"}
        assert listed == await call(client, "GET", "/sessions/one")
        restored = await call(client, "POST", "/sessions/one/restore")
        blocks = prompt_tokens // 16
        assert restored == {"name": "one", "tokens": 16 * blocks, "blocks": blocks, "written_blocks": blocks}
        assert await ask(client) == (prompt_tokens, cached(prompt_tokens))
        again = await call(client, "POST", "/sessions/one/restore")
        assert (again["blocks"], again["written_blocks"]) == (blocks, 0)


@pytest.mark.parametrize("words", range(200, 216))
async def test_a_restored_session_is_hit_like_a_cache_that_never_went_away(tmp_path: Path, words: int) -> None:
    body = HELLO | {"messages": [{"role": "user", "content": "sea " * words}]}
    async with serving(sessions=str(tmp_path)) as (_, client):
        await saved(client, body=body)
        as_ever = await ask(client, body)
    async with serving(sessions=str(tmp_path)) as (_, client):
        await call(client, "POST", "/sessions/one/restore")
        prompt_tokens, cached_tokens = await ask(client, body)
        assert (prompt_tokens, cached_tokens) == as_ever
        assert cached_tokens == prompt_tokens - 1 or cached_tokens == cached(prompt_tokens)


async def test_a_conversation_is_saved_with_its_answers(tmp_path: Path) -> None:
    async with serving(sessions=str(tmp_path)) as (_, client):
        first = await call(client, "POST", CHAT, json=STORY | {"max_tokens": 60})
        told = [*STORY["messages"], first["choices"][0]["message"] | {"refusal": None}]
        body = STORY | {"messages": [{"role": turn["role"], "content": turn["content"]} for turn in told]}
        answer = await call(client, "POST", "/sessions/one/save", json=body)
        assert answer["tokens"] > first["usage"]["prompt_tokens"]
        await call(client, "POST", "/reset_prefix_cache")
        await call(client, "POST", "/sessions/one/restore")
        follow_up = body | {"messages": [*body["messages"], {"role": "user", "content": "and then?"}]}
        assert (await ask(client, follow_up))[1] == answer["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "query"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": "the river and the sea " * 20, "max_tokens": 4}, ""),
        (
            "/v1/messages",
            {"model": "tiny", "max_tokens": 4, "system": "be brief " * 30, "messages": HELLO["messages"]},
            "?api=messages",
        ),
    ],
)
async def test_the_body_that_was_sent_to_be_answered_is_the_one_that_saves(
    tmp_path: Path, path: str, body: dict[str, Any], query: str
) -> None:
    async with serving(sessions=str(tmp_path)) as (_, client):
        await call(client, "POST", path, json=body)
        answer = await call(client, "POST", f"/sessions/one/save{query}", json=body)
        assert answer["prompt_tokens"] - 16 < answer["tokens"] <= answer["prompt_tokens"]


async def test_saving_again_replaces_and_deleting_deletes_the_file_alone(tmp_path: Path) -> None:
    async with serving(sessions=str(tmp_path)) as (_, client):
        first = await saved(client)
        longer = STORY | {"messages": [*STORY["messages"], *STORY["messages"]]}
        assert (await saved(client, body=longer))["tokens"] > first["tokens"]
        assert len((await call(client, "GET", "/sessions"))["sessions"]) == 1
        assert await call(client, "DELETE", "/sessions/one") == {"name": "one", "deleted": True}
        await refused(client, "DELETE", "/sessions/one", 404, "session_not_found")
        assert files_in(tmp_path) == []
        assert (await ask(client))[1] > 0


async def test_a_tenant_sees_restores_and_deletes_its_own_alone(tmp_path: Path) -> None:
    mine, theirs = {"x-warmroute-tenant": "mine"}, {"x-warmroute-tenant": "theirs"}
    async with serving(sessions=str(tmp_path), secret="s", admin_key="an operator's") as (_, client):
        client.headers["x-api-key"] = "an operator's"
        await saved(client, tenant="mine")
        for other in (theirs, {}, {"x-warmroute-tenant": file_of(tmp_path).parent.name}):
            assert (await call(client, "GET", "/sessions", headers=other))["sessions"] == []
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/restore")):
                await refused(client, method, f"/sessions/one{path}", 404, "session_not_found", headers=other)
        # Nor can one tenant save what another's requests have computed.
        await refused(client, "POST", "/sessions/x/save", 409, "nothing_to_save", json=STORY, headers=theirs)
        await call(client, "POST", "/reset_prefix_cache")
        await call(client, "POST", "/sessions/one/restore", headers=mine)
        assert [(await ask(client, tenant=tenant))[1] > 0 for tenant in ("theirs", "", "mine")] == [False, False, True]
        assert b"mine" not in file_of(tmp_path).read_bytes()


async def test_what_is_restored_is_published_as_any_other(tmp_path: Path, redis_url: str) -> None:
    async with serving(sessions=str(tmp_path)) as (_, client):
        await saved(client, body=STORY)
    with redis.Redis.from_url(redis_url) as store:
        async with serving(sessions=str(tmp_path), redis=redis_url, id="r1") as (_, client):
            restored = await call(client, "POST", "/sessions/one/restore")
            held = {bytes.fromhex(key) for key in (await call(client, "GET", "/cache"))["keys"]}
            assert len(held) == restored["blocks"]
            await eventually(lambda: store.smembers("warmroute:{default}:blocks:r1") == held)


async def test_many_at_once_are_done_or_told_to_wait(tmp_path: Path) -> None:
    async with serving(sessions=str(tmp_path)) as (server, client):
        await saved(client)
        paths = [f"/sessions/{name}/save" for name in range(30)] + ["/sessions/one/restore"] * 30

        async def send(path: str) -> int:
            async with client.post(path, json=STORY) as response:
                return response.status

        statuses = await asyncio.gather(*map(send, paths))
        assert set(statuses) <= {200, 429}
        assert 200 in statuses
        await call(client, "POST", "/sessions/one/restore")
        assert server.service is not None
        load = server.service.engine.load()
        assert load.free_blocks + load.evictable_blocks == 512


async def test_a_client_that_leaves_does_not_leave_half_a_session(tmp_path: Path) -> None:
    async with serving(sessions=str(tmp_path)) as (server, client):
        await saved(client)
        engine = engine_of(server)
        for path in ["/sessions/two/save", "/sessions/one/restore"] * 10:
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                async with client.post(path, json=STORY, timeout=aiohttp.ClientTimeout(total=0.002)):
                    pass
        await eventually(lambda: engine.load().free_blocks + engine.load().evictable_blocks == 512)
        for session in (await call(client, "GET", "/sessions"))["sessions"]:
            assert session["refused"] is None
            await call(client, "POST", f"/sessions/{session['name']}/restore")
    assert not any(name.endswith(".part") for name in files_in(tmp_path))


async def test_an_engine_that_is_too_slow_to_answer_keeps_no_blocks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(sessions=str(tmp_path), sim_base_seconds=0.3) as (server, client):
        await saved(client)
        monkeypatch.setattr(sessions, "_ENGINE_SECONDS", 0.01)
        async with client.post(CHAT, json=HELLO | {"stream": True, "max_tokens": 4}) as stream:
            await stream.content.readany()
            assert "retry" in await refused(client, "POST", "/sessions/one/save", 503, "not_ready", json=STORY)
            assert "retry" in await refused(client, "POST", "/sessions/one/restore", 503, "not_ready")
            await stream.read()
        load = engine_of(server).load
        await eventually(lambda: load().free_blocks + load().evictable_blocks == 512)


async def test_what_is_running_when_the_replica_stops_is_broken_off(tmp_path: Path) -> None:
    async with serving(sessions=str(tmp_path), sim_base_seconds=0.3) as (server, client):
        await saved(client)
        async with client.post(CHAT, json=HELLO | {"stream": True, "max_tokens": 40}) as stream:
            await stream.content.readany()
            save = asyncio.ensure_future(client.post("/sessions/two/save", json=STORY))
            await asyncio.wait([save], timeout=0.05)
            await server.stop(grace_seconds=0)
            with contextlib.suppress(aiohttp.ClientError):
                assert (await save).status in (200, 503)
    assert set(files_in(tmp_path)) <= {"one.kv", "two.kv"}


async def test_a_beginning_that_all_tenants_share_is_restored_for_all_and_the_rest_for_one(tmp_path: Path) -> None:
    system = {"role": "system", "content": "you are a guide to the river " * 20}
    public = tmp_path / "public.jsonl"
    public.write_text(json.dumps({"messages": [system]}))
    flags: dict[str, Any] = {"sessions": str(tmp_path / "sessions"), "public_prefixes": str(public)}
    body = STORY | {"messages": [system, *STORY["messages"]]}
    async with serving(**flags) as (_, client):
        await saved(client, body=body, tenant="mine")
    async with serving(**flags) as (_, client):
        await call(client, "POST", "/sessions/one/restore", headers={"x-warmroute-tenant": "mine"})
        theirs, mine = [(await ask(client, body, tenant))[1] for tenant in ("theirs", "mine")]
        assert 0 < theirs < mine


async def test_the_metrics_tell_of_sessions(tmp_path: Path) -> None:
    async with serving(sessions=str(tmp_path)) as (_, client):
        tokens = (await saved(client))["tokens"]
        await call(client, "POST", "/sessions/one/restore")
        await call(client, "GET", "/sessions/one")
        await refused(client, "POST", "/sessions/two/restore", 404, "session_not_found")
        await refused(client, "DELETE", "/sessions/two", 404, "session_not_found")
        async with client.get("/metrics") as response:
            text = await response.text()
    told = {line for line in text.splitlines() if line.startswith("warmroute_session") and "_bucket" not in line}
    assert {line for line in told if line.startswith("warmroute_sessions_total")} == {
        'warmroute_sessions_total{operation="save",outcome="ok"} 1.0',
        'warmroute_sessions_total{operation="restore",outcome="ok"} 1.0',
        'warmroute_sessions_total{operation="restore",outcome="session_not_found"} 1.0',
        'warmroute_sessions_total{operation="delete",outcome="session_not_found"} 1.0',
    }
    for operation in ("save", "restore"):
        assert f'warmroute_session_tokens_total{{operation="{operation}"}} {float(tokens)}' in told
        assert f'warmroute_session_seconds_count{{operation="{operation}"}} 1.0' in told
