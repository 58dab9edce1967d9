"""The engine beside `transformers`' own `generate`: same weights, same prompts, same greedy answers.

    prefix-free     every prompt is its own                      the engine has nothing to reuse
    prefix-heavy    all prompts share all but their ends         generate computes the common part every time

Each at one request at a time and at 16 at once (for generate: a batch, whose prompts are of one length, so that it
needs no padding). The engine's cache is empty when a measurement begins. Both take turns; a ratio compares neighbours.
On a CPU the time is the processor's, which a busy machine stretches less than the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from loadtest.benches.report import BenchReport
from loadtest.benches.spread import Spread
from loadtest.benches.stepped_engine import SteppedEngine
from replica.backend import BackendError
from replica.model_loader import ModelLoadError, load
from replica.model_runner import ModelRunner
from shared.settings import BenchSettings

__all__ = ["run"]

_ANSWER_TOKENS = 32
_VOCABULARY = 1_000


class _Case(NamedTuple):
    shared_tokens: int
    own_tokens: int
    requests: int
    concurrency: int

    @property
    def name(self) -> str:
        kind = "prefix-heavy" if self.shared_tokens else "prefix-free"
        return f"{kind}, {self.concurrency} at once"


_CASES = (
    _Case(0, 192, requests=4, concurrency=1),
    _Case(0, 192, requests=16, concurrency=16),
    _Case(480, 32, requests=4, concurrency=1),
    _Case(480, 32, requests=16, concurrency=16),
)


class _Round(NamedTuple):
    generate_seconds: float
    engine_seconds: float
    computed_tokens: int
    equal_answers: int

    @property
    def ratio(self) -> float:
        return self.generate_seconds / self.engine_seconds


def run(settings: BenchSettings, report: BenchReport) -> None:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    # Two models of equal weights: the engine takes its own over.
    try:
        ours, theirs = (load(settings.model, settings.device, settings.dtype).model for _ in range(2))
    except ModelLoadError as error:
        raise BackendError(str(error)) from error
    longest = max(case.shared_tokens + case.own_tokens for case in _CASES) + _ANSWER_TOKENS
    blocks = 16 * -(-longest // settings.block_size)
    assert theirs.generation_config is not None
    theirs.generation_config.eos_token_id = None  # answers of one length
    engine = SteppedEngine(ModelRunner(ours, blocks, settings.block_size))
    clock = time.process_time if ours.device.type == "cpu" else time.perf_counter
    rng = Random(settings.seed)
    for case in _CASES:
        _measure(engine, theirs, case, rng, clock)
    rounds = {
        case.name: [_measure(engine, theirs, case, rng, clock) for _ in range(settings.repeats)] for case in _CASES
    }
    rows = []
    for case in _CASES:
        each = rounds[case.name]
        answers = case.requests * settings.repeats
        rows.append(
            (
                case.name,
                Spread.of([one.generate_seconds for one in each]).shown(_seconds),
                Spread.of([one.engine_seconds for one in each]).shown(_seconds),
                Spread.of([one.ratio for one in each]).shown(lambda ratio: f"{ratio:.2f} x"),
                f"{each[0].computed_tokens} of {_all_tokens(case)}",
                f"{sum(one.equal_answers for one in each)} of {answers}",
            )
        )
    report.table(
        f"{settings.model}, {ours.device.type}, {ours.dtype}, answers of {_ANSWER_TOKENS} tokens, seconds",
        ("requests", "generate", "engine", "faster", "tokens computed", "equal answers"),
        rows,
    )
    report.write(
        {
            "setup": {"model": settings.model, "device": str(ours.device), "dtype": str(ours.dtype)},
            "cases": {name: [one._asdict() | {"ratio": one.ratio} for one in each] for name, each in rounds.items()},
        },
        [lambda axes: _draw(axes, {name: Spread.of([one.ratio for one in each]) for name, each in rounds.items()})],
    )


def _measure(
    engine: SteppedEngine, model: PreTrainedModel, case: _Case, rng: Random, clock: Callable[[], float]
) -> _Round:
    shared = [rng.randrange(_VOCABULARY) for _ in range(case.shared_tokens)]
    prompts = [shared + [rng.randrange(_VOCABULARY) for _ in range(case.own_tokens)] for _ in range(case.requests)]
    batches = [prompts[first : first + case.concurrency] for first in range(0, case.requests, case.concurrency)]
    began = clock()
    expected = [answer for batch in batches for answer in _generate(model, batch)]
    generated = clock()
    engine.cache.reset()
    served = [engine.serve(batch, _ANSWER_TOKENS) for batch in batches]
    ended = clock()
    answers = [answer for each in served for answer in each.answers]
    equal = sum(map(list.__eq__, expected, answers))
    return _Round(generated - began, ended - generated, sum(each.computed_tokens for each in served), equal)


def _generate(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    inputs = torch.tensor(prompts, device=model.device)
    untyped: Any = model
    output = untyped.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=_ANSWER_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    answers: list[list[int]] = output[:, inputs.shape[1] :].tolist()
    return answers


def _all_tokens(case: _Case) -> int:
    """The last token of an answer is never computed."""
    return case.requests * (case.shared_tokens + case.own_tokens + _ANSWER_TOKENS - 1)


def _draw(axes: Any, ratios: dict[str, Spread]) -> None:
    places = range(len(ratios))
    medians = [ratio.median for ratio in ratios.values()]
    reach = [
        [ratio.median - ratio.least for ratio in ratios.values()],
        [ratio.most - ratio.median for ratio in ratios.values()],
    ]
    axes.barh(places, medians, xerr=reach, color="#4477aa")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(places, list(ratios))
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as generate")


def _seconds(value: float) -> str:
    return f"{value:.2f}"
