"""Other people's routers: how they are named, started and complained about."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.peers import Peer, PeerError, parse_peer, running_peer


def test_a_peer_is_a_name_and_a_command_with_room_for_port_and_replicas() -> None:
    assert parse_peer("other=run --flag=a {port} {replicas}") == Peer("other", "run --flag=a {port} {replicas}")


@pytest.mark.parametrize(
    "told", ["run {port} {replicas}", "x=run {port}", "x=run {replicas}", "a/b=r {port} {replicas}"]
)
def test_anything_else_is_told_what_it_should_be_like(told: str) -> None:
    with pytest.raises(ValueError, match=re.escape("NAME=COMMAND")):
        parse_peer(told)


def test_its_port_and_replicas_are_filled_in_and_it_ends_with_the_run(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "models").write_text("{}")
    program = tmp_path / "server.py"
    program.write_text(
        "import functools, http.server as h, sys\n"
        f"open({str(tmp_path / 'replicas')!r}, 'w').write(' '.join(sys.argv[2:]))\n"
        f"serve = functools.partial(h.SimpleHTTPRequestHandler, directory={str(tmp_path)!r})\n"
        "h.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), serve).serve_forever()\n"
    )
    command = f"{sys.executable} {program} {{port}} {{replicas}}"
    with running_peer(command, ["http://a", "http://b"], subprocess.DEVNULL) as (url, pid):
        assert (tmp_path / "replicas").read_text() == "http://a http://b"
        assert url.startswith("http://127.0.0.1:")
        assert Path(f"/proc/{pid}").exists() or sys.platform != "linux"
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("/no/such {port}", "cannot be run"),
        ("false {port}", "false does not answer"),
        ("'a {port}", "quotation"),
    ],
)
def test_one_that_does_not_start_is_named(command: str, complaint: str) -> None:
    with pytest.raises(PeerError, match=complaint), running_peer(command, [], subprocess.DEVNULL):
        pass
