"""Sessions over HTTP, with the simulated engine: whose they are, what is refused and why, and that they survive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis

from replica import sessions
from replica.backend import BackendError
from replica.server import ReplicaServer
from tests.helpers import eventually
from tests.replica.sim_server import CHAT, HELLO, serving

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
    async with serving(sessions=str(tmp_path), secret="s") as (_, client):
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


async def test_a_file_moved_into_another_tenants_folder_is_refused(tmp_path: Path) -> None:
    async with serving(sessions=str(tmp_path)) as (_, client):
        await saved(client, tenant="mine")
        content = file_of(tmp_path).read_bytes()
        file_of(tmp_path).unlink()
        await saved(client, tenant="theirs")
        file_of(tmp_path).write_bytes(content)
        headers = {"x-warmroute-tenant": "theirs"}
        message = await refused(client, "POST", "/sessions/one/restore", 409, "session_mismatch", headers=headers)
        assert "another tenant" in message
        assert "another tenant" in (await call(client, "GET", "/sessions/one", headers=headers))["refused"]


async def test_what_is_damaged_is_refused_with_the_place_and_nothing_is_restored(tmp_path: Path) -> None:
    async with serving(sessions=str(tmp_path)) as (server, client):
        await saved(client)
        await call(client, "POST", "/reset_prefix_cache")
        path = file_of(tmp_path)
        whole = path.read_bytes()
        flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (9, 20, 900, 1500, len(whole) - 40)]
        for content in (b"", whole[:-1], whole + b"\0", whole[:50], b"not a session at all", *flipped):
            path.write_bytes(content)
            assert await refused(client, "POST", "/sessions/one/restore", 422, "session_damaged")
        assert (await call(client, "GET", "/cache"))["held_blocks"] == 0
        assert server.service is not None
        assert server.service.engine.load().free_blocks == 512
        path.write_bytes(flipped[-1])  # in the KV: the header is whole
        [listed] = (await call(client, "GET", "/sessions"))["sessions"]
        assert listed["refused"] is None
        path.write_bytes(whole[:-1])
        [listed] = (await call(client, "GET", "/sessions"))["sessions"]
        assert "where its header says" in listed["refused"]
        path.write_bytes(whole)
        await call(client, "POST", "/sessions/one/restore")


async def test_a_session_of_another_make_is_refused_by_what_differs(tmp_path: Path) -> None:
    async with serving(sessions=str(tmp_path)) as (_, client):
        await saved(client)
    async with serving(sessions=str(tmp_path), block_size=8) as (_, client):
        message = await refused(client, "POST", "/sessions/one/restore", 409, "session_mismatch")
        assert "block size is 16, ours 8" in message
        assert (await call(client, "GET", "/sessions/one"))["refused"] in message
        assert (await call(client, "GET", "/cache"))["held_blocks"] == 0
    async with serving(sessions=str(tmp_path), secret="other") as (_, client):
        await refused(client, "POST", "/sessions/one/restore", 404, "session_not_found")


async def test_a_pool_without_room_says_whether_it_ever_has_some(tmp_path: Path) -> None:
    async with serving(sessions=str(tmp_path)) as (_, client):
        blocks = (await saved(client))["blocks"]
    async with serving(sessions=str(tmp_path), blocks=blocks - 1) as (_, client):
        assert "--blocks" in await refused(client, "POST", "/sessions/one/restore", 409, "session_too_large")
    slow = {"sim_base_seconds": 0.05, "blocks": blocks + 2}
    async with serving(sessions=str(tmp_path), **slow) as (server, client):
        assert server.service is not None
        engine = server.service.engine
        async with client.post(CHAT, json=HELLO | {"stream": True, "max_tokens": 60}) as stream:
            await stream.content.readany()
            await eventually(lambda: engine.load().running == 1)
            await eventually(lambda: engine.load().free_blocks + engine.load().evictable_blocks <= blocks)
            assert "retry" in await refused(client, "POST", "/sessions/one/restore", 503, "not_enough_room")
            await stream.read()
        await call(client, "POST", "/sessions/one/restore")


@pytest.mark.parametrize("name", ["..%2Fx", "", "x" * 300, "%2e%2e", ".x", "a%20b", "a%00b", "%ff", "a%2Fsave"])
async def test_names_that_are_none_are_refused_everywhere(tmp_path: Path, name: str) -> None:
    async with serving(sessions=str(tmp_path / "sessions")) as (server, client):
        # Raw, since a client would tidy the path.
        for request in ("POST /save", "POST /restore", "GET ", "DELETE "):
            method, action = request.split(" ")
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
            body = json.dumps(STORY).encode() if action == "/save" else b""
            head = f"{method} /sessions/{name}{action} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
            answer = (await reader.read()).decode()
            writer.close()
            assert answer.split(" ")[1] == "400", answer
            assert "invalid_session_name" in answer
        assert client
    assert files_in(tmp_path) == []


async def test_bad_requests_are_told_what_to_change(tmp_path: Path) -> None:
    async with serving(sessions=str(tmp_path)) as (_, client):
        save = "/sessions/one/save"
        assert "send it" in await refused(client, "POST", save, 409, "nothing_to_save", json=STORY)
        await refused(client, "POST", f"{save}?kv=fp4", 400, "invalid_value", json=STORY)
        await refused(client, "POST", f"{save}?api=soap", 400, "invalid_value", json=STORY)
        await ask(client)
        assert "raw" in await refused(client, "POST", f"{save}?kv=int8", 400, "unsupported_parameter", json=STORY)
        await refused(client, "POST", save, 404, "model_not_found", json=STORY | {"model": "other"})
        await refused(client, "POST", save, 400, "invalid_json", data=b"{")
        await refused(client, "PUT", "/sessions/one", 405, "method_not_allowed")
        await refused(client, "POST", "/sessions/one/eat", 404, "path_not_found")
        assert files_in(tmp_path) == []


async def test_a_full_folder_refuses_to_save(tmp_path: Path) -> None:
    async with serving(sessions=str(tmp_path), sessions_bytes=1000) as (_, client):
        await ask(client)
        message = await refused(client, "POST", "/sessions/one/save", 507, "sessions_full", json=STORY)
        assert "--sessions-bytes" in message


async def test_a_replica_without_a_folder_says_how_to_get_one() -> None:
    async with serving() as (_, client):
        assert "--sessions DIR" in await refused(client, "GET", "/sessions", 404, "sessions_disabled")
        await refused(client, "POST", "/sessions/one/restore", 404, "sessions_disabled")


async def test_a_folder_that_cannot_be_used_is_one_clear_line_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BackendError, match=r"--sessions .*file.* cannot be used") as raised:
        async with serving(sessions=str(tmp_path / "file")):
            pass
    assert "\n" not in str(raised.value)


async def test_a_folder_that_goes_away_is_an_error_and_the_server_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "sessions"
    async with serving(sessions=str(directory)) as (_, client):
        await saved(client)
        path = file_of(directory)
        path.unlink()
        path.parent.rmdir()
        (directory / ".lock").unlink()
        directory.rmdir()
        await refused(client, "POST", "/sessions/one/save", 507, "sessions_unusable", json=STORY)
        await refused(client, "POST", "/sessions/one/restore", 404, "session_not_found")
        assert (await ask(client))[1] > 0
        assert (await call(client, "GET", "/sessions"))["sessions"] == []


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
        engine = _engine(server)
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
        load = _engine(server).load
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


def _engine(server: ReplicaServer) -> Any:
    assert server.service is not None
    return server.service.engine
