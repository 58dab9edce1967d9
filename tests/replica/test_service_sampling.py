"""What a request asks of the sampler is what the engine gets."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import pytest

import replica.server
from replica.backend import Backend, load_backend
from replica.runner import Chunk, Runner, StepResult
from replica.sequence import SamplingParams
from shared.settings import ReplicaSettings
from tests.replica.pool_runner import RunnerAround
from tests.replica.sim_server import HELLO, serving


class RecordingRunner(RunnerAround):
    """Keeps the parameters of every sequence it computes, in order of first sight."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.seen: dict[str, SamplingParams] = {}

    def execute(self, chunks: Items[Chunk]) -> StepResult:
        for chunk in chunks:
            self.seen.setdefault(chunk.sequence.request_id, chunk.sequence.params)
        return self._runner.execute(chunks)


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[RecordingRunner]:
    made: list[RecordingRunner] = []

    def load(settings: ReplicaSettings) -> Backend:
        backend = load_backend(settings)
        made.append(RecordingRunner(backend.runner))
        return replace(backend, runner=made[-1])

    monkeypatch.setattr(replica.server, "load_backend", load)
    return made


async def sampled(
    runners: list[RecordingRunner], bodies: list[dict[str, Any]], **settings: Any
) -> list[SamplingParams]:
    async with serving(**settings) as (_, client):
        for body in bodies:
            path = body.pop("path", "/v1/chat/completions")
            async with client.post(path, json=HELLO | body) as response:
                assert response.status == 200, await response.text()
    return list(runners[-1].seen.values())


async def test_every_parameter_reaches_the_engine(runners: list[RecordingRunner]) -> None:
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop_token_ids": [3], "ignore_eos": True, "max_tokens": 2}
    more: dict[str, Any] = {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "min_p": 0.1,
        "seed": 11,
    }
    more |= {"logit_bias": {"5": 2}, "logprobs": True, "top_logprobs": 2}
    [openai, anthropic] = await sampled(runners, [asked | more, asked | {"path": "/v1/messages"}])
    expected = SamplingParams(
        max_tokens=2, temperature=0.5, top_p=0.9, top_k=7, seed=11, stop_token_ids=frozenset({3}), ignore_eos=True
    )
    assert openai == replace(
        expected,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        min_p=0.1,
        logit_bias={5: 2.0},
        top_logprobs=2,
    )
    assert replace(anthropic, seed=11) == expected


async def test_more_answers_have_seeds_of_their_own_and_do_not_change_the_first(
    runners: list[RecordingRunner],
) -> None:
    seeds = [params.seed for params in await sampled(runners, [{"seed": 5, "n": 3}, {"seed": 5}, {"seed": 5, "n": 2}])]
    first_three, one, two = seeds[:3], seeds[3], seeds[4:]
    assert one == first_three[0] == two[0] == 5
    assert two[1] == first_three[1]
    assert len(set(first_three)) == 3


async def test_requests_without_a_seed_get_their_own_which_the_server_seed_decides(
    runners: list[RecordingRunner],
) -> None:
    async def seeds(server_seed: int) -> list[int | None]:
        return [params.seed for params in await sampled(runners, [{}, {}], seed=server_seed)]

    first = await seeds(1)
    assert first == await seeds(1) != await seeds(2)
    assert first[0] != first[1]
