"""The Compose cluster, built and run for real: it serves, it caches, and it outlives a replica that is killed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.helpers import wait_until

ROOT = Path(__file__).parents[2]
SERVICES = ("redis", "replica-1", "replica-2", "router")
STREAMS = 8
# Ends the server itself, as a crash would; the container's init then exits and Docker's restart policy takes over.
KILL_THE_SERVER = """
import os, pathlib, signal
for process in pathlib.Path('/proc').glob('[0-9]*'):
    if b'warmroute\\0replica' in (process / 'cmdline').read_bytes():
        if int(process.name) not in (1, os.getpid()):
            os.kill(int(process.name), signal.SIGKILL)
"""

pytestmark = pytest.mark.timeout(1500)


def docker_is_there() -> bool:
    return bool(shutil.which("docker")) and subprocess.run(["docker", "info"], capture_output=True).returncode == 0


def compose_command() -> list[str]:
    modern = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    return ["docker", "compose"] if modern else ["docker-compose"]


@dataclass(frozen=True)
class Cluster:
    """One Compose project with its own name and port, so that a cluster already running here is left alone."""

    command: tuple[str, ...]
    environment: dict[str, str]
    port: int

    def compose(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self.command, *arguments], cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=1200
        )
        assert done.returncode == 0, f"compose {' '.join(arguments)}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=120)

    def accepting(self) -> set[str]:
        return {replica["id"] for replica in self.replicas() if replica["state"] == "accepting"}

    def replicas(self) -> list[dict[str, Any]]:
        """The router's own list; empty while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/replicas", timeout=5) as response:
                listed: list[dict[str, Any]] = json.load(response)["replicas"]
        except OSError:
            return []
        return listed


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if not docker_is_there():
        pytest.skip("no Docker engine answers on this machine")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "COMPOSE_PROJECT_NAME": "warmroute-test",
        "DOCKER_BUILDKIT": "0",
        "COMPOSE_DOCKER_CLI_BUILD": "0",
        "WARMROUTE_PUBLISH": str(port),
        "WARMROUTE_SECRET": "compose-test-secret",
    }
    subprocess.run(["deploy/gather-wheels", "deploy/wheels"], cwd=ROOT, env=environment, check=True)
    cluster = Cluster(tuple(compose_command()), environment, port)
    cluster.compose("build", "replica-1", "router")
    try:
        cluster.compose("up", "--detach", "--no-build")
        wait_until(lambda: len(cluster.accepting()) == 2, 120, "two replicas accepting behind the router")
        yield cluster
    finally:
        # What the servers said is the first thing to read when a test here fails.
        print(cluster.compose("logs", "--no-color", "--tail", "60"))
        cluster.compose("down", "--volumes", "--timeout", "20")


def test_every_service_becomes_healthy(cluster: Cluster) -> None:
    def states() -> list[str]:
        ids = cluster.compose("ps", "--quiet").split()
        shape = "{{.State.Health.Status}}"
        return subprocess.run(
            ["docker", "inspect", "--format", shape, *ids], capture_output=True, text=True
        ).stdout.split()

    wait_until(lambda: states() == ["healthy"] * len(SERVICES), 60, "all services healthy")


def test_a_second_turn_hits_the_cache_of_the_replica_that_had_the_first(cluster: Cluster) -> None:
    for conversation in range(4):
        story = f"Conversation {conversation}. " + "The lighthouse keeper wrote down the weather. " * 40
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": story}]
        first = cluster.client.chat.completions.with_raw_response.create(
            model="tiny", messages=messages, max_tokens=24, temperature=0
        )
        answer = first.parse().choices[0].message.content
        first_usage = first.parse().usage
        assert first_usage is not None
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And the next day?"}]

        second = cluster.client.chat.completions.with_raw_response.create(
            model="tiny", messages=messages, max_tokens=8, temperature=0
        )

        usage = second.parse().usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert second.headers["x-warmroute-replica"] == first.headers["x-warmroute-replica"]
        # All full blocks of the first prompt, at the very least (16 tokens a block).
        assert usage.prompt_tokens_details.cached_tokens is not None
        assert usage.prompt_tokens_details.cached_tokens >= first_usage.prompt_tokens // 16 * 16
        # The router foresees whole blocks; the replica may find part of one more.
        predicted = int(second.headers["x-warmroute-predicted-tokens"])
        assert predicted <= usage.prompt_tokens_details.cached_tokens < predicted + 16


def test_a_replica_killed_with_requests_in_flight_takes_nothing_else_with_it(cluster: Cluster) -> None:
    assert len(cluster.accepting()) == 2
    with ThreadPoolExecutor(STREAMS) as pool:
        answers: list[Future[tuple[str, str]]] = [pool.submit(stream_one, cluster, i) for i in range(STREAMS)]
        wait_until(lambda: in_flight(cluster) >= STREAMS, 60, "all streams in flight")

        cluster.compose("exec", "-T", "replica-1", "python", "-c", KILL_THE_SERVER)

        ended = [answer.result(timeout=180) for answer in answers]
    assert any(replica == "replica-1" for replica, _ in ended), "nothing was running on the killed replica"
    for replica, how in ended:
        assert how == "finished" or (replica == "replica-1" and how == "replica_failed"), (replica, how)

    # The others go on at once, and the killed one comes back by itself.
    answer = cluster.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Still there?"}], max_tokens=4
    )
    assert answer.choices[0].finish_reason == "length"
    wait_until(lambda: len(cluster.accepting()) == 2, 90, "the killed replica back in the fleet")


def stream_one(cluster: Cluster, number: int) -> tuple[str, str]:
    """(replica, "finished" or the code of the error that ended the stream)."""
    prompt = f"Stream {number}: " + "count the waves as they come in. " * 10
    with cluster.client.chat.completions.with_streaming_response.create(
        model="tiny",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=600,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as response:
        replica = response.headers["x-warmroute-replica"]
        try:
            for _ in response.parse():
                pass
        except openai.APIError as error:
            return replica, str(error.code)
    return replica, "finished"


def in_flight(cluster: Cluster) -> int:
    return sum(replica["active"] for replica in cluster.replicas())
