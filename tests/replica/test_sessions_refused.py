"""What sessions refuse, and what they say then."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from replica.backend import BackendError
from tests.helpers import eventually
from tests.replica.session_client import STORY, ask, call, engine_of, file_of, files_in, refused, saved
from tests.replica.sim_server import CHAT, HELLO, serving


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


async def test_whatever_becomes_of_a_file_is_refused_and_disturbs_nobody(tmp_path: Path) -> None:
    random_ = random.Random(3)

    def spoil(content: bytes) -> bytes:
        at, length = random_.randrange(len(content)), random_.choice([1, 2, 16, 32, 200])
        piece = random_.choice([random_.randbytes(length), bytes(length), b"", content[:length], content[-length:]])
        match random_.randrange(3):
            case 0:
                return content[:at] + piece + content[at:]
            case 1:
                return content[:at] + piece + content[at + length :]
            case _:
                return content[:at] + piece

    async with serving(sessions=str(tmp_path)) as (server, client):
        await saved(client)
        path = file_of(tmp_path)
        whole = path.read_bytes()
        await call(client, "POST", "/reset_prefix_cache")
        for _ in range(150):
            spoilt = spoil(spoil(whole) if random_.random() < 0.3 else whole)
            if spoilt and spoilt != whole:
                path.write_bytes(spoilt)
                await refused(client, "POST", "/sessions/one/restore", 422, "session_damaged")
                await call(client, "GET", "/sessions/one")
        assert (await call(client, "GET", "/cache"))["held_blocks"] == 0
        assert engine_of(server).load().free_blocks == 512
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
