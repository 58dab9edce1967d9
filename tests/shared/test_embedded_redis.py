"""Finding a Redis server, and leaving nothing behind: not even when we are killed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import redis

from shared.embedded_redis import EmbeddedRedisError, find_or_start, start
from tests.helpers import wait_until


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where servers have their folders in this test, and nobody else has."""
    folder = tmp_path / "servers"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_a_given_url_is_used_as_it_is_and_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://environment:1/0")
    with find_or_start("redis://given:1/0") as server:
        assert (server.url, server.pid) == ("redis://given:1/0", None)
    with find_or_start() as server:
        assert (server.url, server.pid) == ("redis://environment:1/0", None)


def test_our_own_server_answers_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, folders: Path) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    with find_or_start() as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("key", "value")
            assert client.get("key") == b"value"
        assert server.pid is not None
        assert alive(server.pid)
        assert len(list(folders.iterdir())) == 1
    assert not alive(server.pid)
    assert list(folders.iterdir()) == []


def test_two_servers_do_not_meet() -> None:
    with start() as one, start() as two:
        assert one.url != two.url


def test_a_server_on_path_comes_before_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    executable = tmp_path / "valkey-server"
    executable.write_text("#!/bin/sh\necho 'no thanks' ; exit 3\n")
    executable.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(shutil, "which", lambda name: str(executable) if "valkey" in name else None)
    with pytest.raises(EmbeddedRedisError, match="did not start on port"), start():
        pass


def test_a_port_that_is_taken_is_said_in_one_line_and_nothing_stays(folders: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EmbeddedRedisError, match=f"did not start on port {port}: .*") as failure, start(port):
            pass
    assert "\n" not in str(failure.value)
    assert list(folders.iterdir()) == []


def test_no_server_anywhere_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EmbeddedRedisError, match="pass --redis URL or set REDIS_URL, or install one"), start():
        pass


def test_the_server_and_its_folder_go_when_we_are_killed_outright(folders: Path) -> None:
    program = (
        "import sys, time\n"
        "from shared.embedded_redis import start\n"
        "with start() as server:\n"
        "    sys.stdout.write(f'{server.pid}\\n'); sys.stdout.flush(); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert alive(pid)
        os.kill(owner.pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid), what="the end of the server")
    wait_until(lambda: list(folders.iterdir()) == [], what="the end of its folder")
