"""A router whose log cannot be written, or is read by nobody, serves on."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request

import pytest


@pytest.mark.parametrize("log", ["a full disk", "a pipe that nobody reads"])
def test_a_router_whose_log_cannot_be_written_serves_on(log: str) -> None:
    reading, writing = os.pipe()
    stderr = os.open("/dev/full", os.O_WRONLY) if log == "a full disk" else writing
    flags = ("--port", "0", "--replica", "http://127.0.0.1:1", "--log-level", "info")
    with subprocess.Popen(
        [sys.executable, "-m", "warmroute", "router", *flags],
        env={name: value for name, value in os.environ.items() if name not in ("REDIS_URL", "WARMROUTE_REDIS")},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix("ready ").strip()
            for _ in range(600):  # a line of log each: more than a pipe holds
                assert status(f"{url}/v1/embeddings") == 503
            assert status(f"{url}/health") == 200
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()
            for descriptor in {reading, writing, stderr}:
                os.close(descriptor)


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
