"""When the engine fails under a request, its client is told and the next one is served."""

from __future__ import annotations

import json
from collections.abc import Sequence as Items
from dataclasses import replace

import pytest

import replica.server
from replica.backend import Backend, load_backend
from replica.runner import Chunk, Runner, RunnerError, StepResult
from shared.settings import ReplicaSettings
from tests.replica.pool_runner import RunnerAround
from tests.replica.sim_server import CHAT, HELLO, serving


class FailingRunner(RunnerAround):
    """Fails at the given step, once."""

    def __init__(self, runner: Runner, step: int) -> None:
        super().__init__(runner)
        self._steps_left = step

    def execute(self, chunks: Items[Chunk]) -> StepResult:
        self._steps_left -= 1
        if self._steps_left == 0:
            raise RunnerError("the device caught fire")
        return self._runner.execute(chunks)


def fail_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    def load(settings: ReplicaSettings) -> Backend:
        backend = load_backend(settings)
        return replace(backend, runner=FailingRunner(backend.runner, step))

    monkeypatch.setattr(replica.server, "load_backend", load)


@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_token_it_is_a_plain_error(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    fail_at(monkeypatch, step=1)
    async with serving() as (_, client):
        async with client.post(CHAT, json=HELLO | {"stream": stream}) as response:
            assert response.status == 500
            error = (await response.json())["error"]
        assert error["code"] == "internal_error"
        assert "caught fire" in error["message"]
        async with client.post(CHAT, json=HELLO) as response:
            assert response.status == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_after_it_the_stream_ends_with_the_error(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    fail_at(monkeypatch, step=4)
    async with serving() as (_, client):
        async with client.post(path, json=HELLO | {"stream": True}) as response:
            assert response.status == 200
            frames = [frame for frame in (await response.text()).split("\n\n") if frame]
        if path == CHAT:
            assert frames.pop() == "data: [DONE]"
        error = json.loads(frames[-1].partition("data: ")[2])["error"]
        assert "caught fire" in error["message"]
        async with client.get("/metrics") as response:
            assert (
                f'warmroute_requests_total{{endpoint="{path}",outcome="internal_error"}} 1.0' in await response.text()
            )
        async with client.post(CHAT, json=HELLO) as response:
            assert response.status == 200
