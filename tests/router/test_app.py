"""The program: its one line, its exit statuses, and how it stops."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.helpers import eventually
from tests.router.conftest import BenchFactory, chat
from tests.router.fake_replica import FakeReplica, open_stream


@contextmanager
def program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "warmroute", "router", "--redis", "none", "--host", "127.0.0.1", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ready_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    word, url = process.stdout.readline().split()
    assert word == "ready"
    return url


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_ready_once_and_stops_cleanly_on_a_signal(number: signal.Signals) -> None:
    with program("--port", "0") as process:
        assert ready_url(process).startswith("http://127.0.0.1:")
        process.send_signal(number)
        rest, log = process.communicate(timeout=10)
        assert (process.returncode, rest) == (0, "")
        assert "nobody to route to" in log


def test_a_port_that_is_taken_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with program("--port", port, "--log-level", "error") as process:
            out, log = process.communicate(timeout=10)
            assert (process.returncode, out) == (1, "")
            assert log.count("\n") == 1
            assert f"cannot listen on 127.0.0.1:{port}" in log
            assert "choose another --port" in log


def test_an_unknown_policy_is_one_clear_line() -> None:
    with program("--policy", "warmest") as process:
        out, log = process.communicate(timeout=10)
        assert (process.returncode, out, log.count("\n")) == (2, "", 1)
        assert "cache-aware" in log


async def test_streams_finish_after_sigterm_while_ready_says_no() -> None:
    release = asyncio.Event()

    async def slow(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(b"data: 1\n\n")
        await release.wait()
        await response.write(b"data: 2\n\n")
        await response.write_eof()
        return response

    async with FakeReplica() as replica, aiohttp.ClientSession() as client:
        replica.behave = slow
        with program("--port", "0", "--replica", replica.url) as process:
            url = await asyncio.to_thread(ready_url, process)
            await _until_ready(client, url)
            async with client.post(url + "/v1/chat/completions", json=chat()) as response:
                assert await response.content.readany() == b"data: 1\n\n"
                process.send_signal(signal.SIGTERM)
                await _until_ready(client, url, status=503)
                async with client.post(url + "/v1/chat/completions", json=chat()) as refused:
                    assert refused.status == 503
                    assert (await refused.json())["error"]["code"] == "shutting_down"
                release.set()
                assert await response.content.read() == b"data: 2\n\n"
            assert await asyncio.to_thread(process.wait, 10) == 0


async def test_what_does_not_finish_within_the_grace_ends_with_a_clear_error(bench: BenchFactory) -> None:
    async def endless(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(b"data: 1\n\n")
        await asyncio.Event().wait()
        return response

    b = await bench(1, grace_seconds=0.2)
    b.replicas[0].behave = endless
    async with b.client.post(b.url, json=chat()) as response:
        assert await response.content.readany() == b"data: 1\n\n"
        begun = time.monotonic()
        await b.router.drain(asyncio.Event())
        assert 0.15 < time.monotonic() - begun < 1.0
        ending = await response.content.read()
    assert json.loads(ending.split(b"\n\n")[1].removeprefix(b"data: "))["error"]["code"] == "shutting_down"
    await b.settled()
    await eventually(lambda: b.replicas[0].active == 0)


async def _until_ready(client: aiohttp.ClientSession, url: str, status: int = 200) -> None:
    answers: list[int] = []

    async def ask() -> None:
        async with client.get(url + "/ready") as response:
            answers.append(response.status)

    async with asyncio.timeout(10):
        await ask()
        while answers[-1] != status:
            await asyncio.sleep(0.02)
            await ask()


async def test_the_program_itself_tells_who_has_left_from_who_only_ended_sending() -> None:
    """It runs on another event loop than these tests do."""
    release = asyncio.Event()

    async def wait(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        await release.wait()
        return web.Response(text="done")

    async with FakeReplica() as replica:
        replica.behave = wait
        with program("--port", "0", "--replica", replica.url) as process:
            url = await asyncio.to_thread(ready_url, process)
            async with aiohttp.ClientSession() as client:
                await _until_ready(client, url)
            host, port = url.removeprefix("http://").split(":")
            body = json.dumps(chat(False)).encode()
            sent = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            (_, leaving), (reader, staying) = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
            for writer in (leaving, staying):
                writer.write(sent)
            await eventually(lambda: replica.active == 2, what="both requests at the replica")
            leaving.close()
            staying.write_eof()
            await eventually(lambda: replica.cancelled == 1, what="the request of the one who left is given up")
            release.set()
            assert (await asyncio.wait_for(reader.read(), 10)).endswith(b"\r\n\r\ndone")
            staying.close()


async def test_the_log_is_json_where_asked_tells_the_decision_and_neither_prompts_nor_keys(tmp_path: Path) -> None:
    keys, key = tmp_path / "keys.toml", "sk-acme-0123456789abcdef"
    keys.write_text(f'[[key]]\nkey = "{key}"\ntenant = "acme"\n')
    flags = (
        "--port",
        "0",
        "--log-format",
        "json",
        "--log-level",
        "debug",
        "--policy",
        "round-robin",
        "--api-keys",
        str(keys),
    )
    async with FakeReplica() as replica, aiohttp.ClientSession() as client:
        with program(*flags, "--replica", replica.url) as process:
            url = await asyncio.to_thread(ready_url, process)
            await _until_ready(client, url)
            for given, body in ((key, chat(text="whisper")), (key, "whisper"), ("sk-wrong-whisper-wrong", chat())):
                headers = {"authorization": f"Bearer {given}", "x-request-id": "mine-1", "cookie": "whisper"}
                async with client.post(url + "/v1/chat/completions?q=whisper", json=body, headers=headers) as response:
                    assert response.headers["x-request-id"] == "mine-1"
                    await response.read()
            process.send_signal(signal.SIGTERM)
            _, log = await asyncio.to_thread(process.communicate, timeout=10)
    lines = [json.loads(line) for line in log.splitlines()]
    told = next(line for line in lines if line["event"] == "request" and line["outcome"] == "ok")
    assert told.items() >= {"id": "mine-1", "replica": replica.id, "reason": "turn", "cached_tokens": 7}.items()
    assert not [line for line in log.splitlines() if "whisper" in line or key in line]
