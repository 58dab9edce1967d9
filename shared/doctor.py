"""`warmroute doctor`: what this machine has, what it lacks, and what to do about it. Changes nothing."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import redis
from rich.console import Console
from rich.table import Table

from shared.embedded_redis import EmbeddedRedisError, start
from shared.local_cluster import port_is_free
from shared.settings import DoctorSettings

__all__ = ["Finding", "examine", "run"]

_REDIS_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """`needed`: warmroute cannot work without it; else something is missing that only some commands want."""

    what: str
    good: bool
    found: str
    advice: str = ""
    needed: bool = False


def run(settings: DoctorSettings) -> int:
    """0 where `warmroute up --engine sim` would work, else 1."""
    findings = list(examine(settings))
    table = Table(box=None, pad_edge=False)
    for heading in ("", "", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        mark = "[green]ok[/]" if finding.good else "[red]no[/]" if finding.needed else "[yellow]--[/]"
        table.add_row(mark, finding.what, finding.found, "" if finding.good else finding.advice)
    Console().print(table)
    return 0 if all(finding.good or not finding.needed for finding in findings) else 1


def examine(settings: DoctorSettings) -> Iterator[Finding]:
    yield Finding("python", True, f"{platform.python_version()} at {sys.executable}")
    yield Finding("cores", True, f"{len(os.sched_getaffinity(0))}")
    yield _redis(settings.redis)
    yield _port(settings.port)
    yield _package("torch", "pip install 'warmroute\\[engine]'; without it, --engine sim works")
    yield _package("transformers", "pip install 'warmroute\\[engine]'")
    yield _gpu()
    yield _package("locust", "pip install 'warmroute\\[loadtest]', for compare")
    yield _docker()


def _redis(url: str | None) -> Finding:
    if url is not None:
        try:
            with redis.Redis.from_url(
                url, socket_timeout=_REDIS_SECONDS, socket_connect_timeout=_REDIS_SECONDS
            ) as client:
                return Finding("redis", True, f"{client.info('server')['redis_version']}, at the URL given")
        except (redis.RedisError, OSError, ValueError) as error:
            advice = "start it, or leave out --redis and REDIS_URL and one is started"
            return Finding("redis", False, f"no answer at the URL given ({type(error).__name__})", advice, needed=True)
    try:
        with start() as server, redis.Redis.from_url(server.url) as client:
            return Finding("redis", True, f"{client.info('server')['redis_version']}, can be started here")
    except EmbeddedRedisError as error:
        return Finding("redis", False, "none", str(error), needed=True)


def _port(port: int) -> Finding:
    if port_is_free("127.0.0.1", port):
        return Finding("port", True, f"{port} is free")
    return Finding("port", False, f"{port} is taken", "choose another with --port", needed=True)


def _package(name: str, advice: str) -> Finding:
    # Looked for, not imported: importing torch takes seconds.
    if importlib.util.find_spec(name) is None:
        return Finding(name, False, "not installed", advice)
    try:
        return Finding(name, True, version(name))
    except PackageNotFoundError:
        return Finding(name, True, "installed")


def _gpu() -> Finding:
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    if not cards:
        return Finding("cuda", False, "no NVIDIA GPU", "none needed: the engine runs on the CPU too")
    model = next((line for line in cards[0].read_text().splitlines() if line.startswith("Model:")), "Model: unknown")
    return Finding("cuda", True, f"{len(cards)} x {model.removeprefix('Model:').strip()}")


def _docker() -> Finding:
    path = shutil.which("docker")
    if path is None:
        return Finding("docker", False, "not installed", "only `docker compose` deployments need it")
    reachable = Path("/var/run/docker.sock").exists() or "DOCKER_HOST" in os.environ
    return Finding("docker", reachable, path if reachable else "client only", "start the Docker daemon")
