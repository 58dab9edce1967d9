"""Every step from logits to token, against transformers' processors and against the definitions, spelled out."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from replica.penalties import penalized
from replica.sampler import sample, token_logprobs
from replica.sequence import Sequence
from tests.replica.tiny_zoo import make_sequence

VOCABULARY = 61
PROMPT = [3, 5, 5, 9]
OUTPUT = [5, 7, 7, 7]


def after_some_output(**params: Any) -> Sequence:
    sequence = make_sequence(PROMPT, **({"temperature": 1.0} | params))
    sequence.tokens += OUTPUT
    return sequence


def some_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def by_the_book(logits: torch.Tensor, sequence: Sequence) -> int:
    """What transformers' processors, in the documented order, and one draw make of a row of logits."""
    params = sequence.params
    seen = torch.LongTensor([sequence.tokens])
    scores = logits[None].clone()
    processors: list[LogitsProcessor] = []
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias.items()]))
    processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    for processor in processors:
        scores = processor(seen, scores)
    for token, count in Counter(OUTPUT).items():
        scores[0, token] -= params.frequency_penalty * count + params.presence_penalty
    if params.temperature == 0:
        return int(scores.argmax())
    scores = TemperatureLogitsWarper(params.temperature)(seen, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(seen, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(seen, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(seen, scores)
    shares = scores[0].double().softmax(-1).tolist()
    filtered = bool(params.min_p or 0 < params.top_k < len(shares) or params.top_p < 1)
    order = sorted(range(len(shares)), key=lambda token: -shares[token]) if filtered else list(range(len(shares)))
    assert params.seed is not None
    target = random.Random(f"{params.seed}/{len(OUTPUT)}").random()
    reached = itertools.accumulate(shares[token] for token in order)
    return next(token for token, sum_so_far in zip(order, reached, strict=True) if sum_so_far > target)


def test_a_mixed_batch_draws_what_transformers_would_let_each_request_draw() -> None:
    generator = random.Random(4)
    sequences = []
    for seed in range(300):
        choices: dict[str, list[Any]] = {
            "temperature": [0.0, 0.3, 1.0, 1.7],
            "top_p": [1.0, 0.9, 0.5, 0.05],
            "top_k": [0, 1, 5, 40, 10_000],
            "min_p": [0.0, 0.02, 0.5],
            "repetition_penalty": [1.0, 1.3, 0.7],
            "presence_penalty": [0.0, 1.5, -2.0],
            "frequency_penalty": [0.0, 0.8, -0.4],
            "logit_bias": [{}, {5: 4.0, 60: -100.0}, {0: 100.0}],
        }
        sequences.append(after_some_output(seed=seed, **{name: generator.choice(v) for name, v in choices.items()}))
    logits = some_logits(len(sequences))
    before = logits.clone()

    assert sample(logits, sequences) == [by_the_book(*pair) for pair in zip(logits, sequences, strict=True)]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
def test_where_many_tokens_are_likely_none_is_overlooked(spread: float) -> None:
    filters: list[dict[str, Any]] = [
        {"top_p": 0.95},
        {"top_p": 0.3},
        {"min_p": 0.01},
        {"min_p": 0.01, "top_p": 0.9},
        {"top_k": 1024, "top_p": 0.9},
        {"top_k": 3000, "min_p": 0.001},
        {"top_p": 0.9, "temperature": 5.0},
    ]
    sequences = [after_some_output(seed=seed, **filters[seed % len(filters)]) for seed in range(42)]
    logits = spread * torch.randn(len(sequences), 5000, generator=torch.Generator().manual_seed(3))

    assert sample(logits, sequences) == [by_the_book(*pair) for pair in zip(logits, sequences, strict=True)]


def test_the_company_of_a_request_never_changes_what_it_draws() -> None:
    filters: list[dict[str, Any]] = [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1, "frequency_penalty": 0.5}]
    sequences = [after_some_output(seed=seed, **filters[seed % 4]) for seed in range(40)]
    # Coarse logits, as half precision gives them: many tokens are equally likely, and their order must not matter.
    logits = some_logits(len(sequences)).mul(2).round().div(2)

    alone = [sample(logits[row : row + 1], [sequence])[0] for row, sequence in enumerate(sequences)]
    shuffled = random.Random(1).sample(range(len(sequences)), len(sequences))
    together = sample(logits[shuffled], [sequences[row] for row in shuffled])

    assert together == [alone[row] for row in shuffled]
    assert len(set(alone)) > 10


def test_repetition_minds_prompt_and_output_the_other_penalties_output_alone() -> None:
    logits = torch.ones(3, VOCABULARY)
    logits[:, 9] = -1.0  # in the prompt only
    repetition, presence, frequency = penalized(
        logits,
        [
            after_some_output(repetition_penalty=2.0),
            after_some_output(presence_penalty=0.5),
            after_some_output(frequency_penalty=0.5),
        ],
    )
    assert [repetition[token].item() for token in (3, 5, 7, 9, 10)] == [0.5, 0.5, 0.5, -2.0, 1.0]
    assert [presence[token].item() for token in (3, 5, 7, 9, 10)] == [1.0, 0.5, 0.5, -1.0, 1.0]
    assert [frequency[token].item() for token in (3, 5, 7, 9, 10)] == [1.0, 0.5, -0.5, -1.0, 1.0]


def test_where_nobody_wants_them_changed_logits_are_not_copied() -> None:
    logits = some_logits(2)
    assert penalized(logits, [after_some_output(top_p=0.5), after_some_output()]) is logits


@pytest.mark.parametrize("bias", [100.0, -100.0])
def test_a_strong_bias_makes_a_token_certain_or_impossible_for_greedy_requests_too(bias: float) -> None:
    logits = some_logits(1)
    best = int(logits.argmax())
    for temperature in (0.0, 1.0):
        drawn = {
            sample(logits, [after_some_output(temperature=temperature, seed=seed, logit_bias={best: bias})])[0]
            for seed in range(50)
        }
        assert drawn == {best} if bias > 0 else best not in drawn


def test_a_bias_on_a_token_the_model_does_not_have_changes_nothing() -> None:
    logits = some_logits(1)
    assert torch.equal(penalized(logits, [after_some_output(logit_bias={VOCABULARY: 5.0})]), logits)


def test_logprobs_are_those_of_the_model_whatever_the_request_does_to_them() -> None:
    logits = some_logits(3)
    sequences = [
        after_some_output(top_logprobs=3, temperature=0.2, top_k=1, logit_bias={4: 100.0}),
        after_some_output(),
        after_some_output(top_logprobs=0),
    ]
    tokens = sample(logits, sequences)
    told = token_logprobs(logits, tokens, sequences)

    assert told is not None
    shares = logits.log_softmax(-1)
    first, nothing, last = told
    assert nothing is None
    assert first is not None
    assert last is not None
    assert first.token == 4
    assert first.logprob == pytest.approx(shares[0, 4].item())
    best = shares[0].sort(descending=True)
    assert [token for token, _ in first.top] == best.indices[:3].tolist()
    assert [logprob for _, logprob in first.top] == pytest.approx(best.values[:3].tolist())
    assert last.top == ()
    assert last.logprob == pytest.approx(shares[2, tokens[2]].item())


def test_an_impossible_token_has_a_number_that_json_can_carry() -> None:
    logits = torch.full((1, VOCABULARY), float("-inf"))
    logits[0, 8] = 0.0
    told = token_logprobs(logits, [8], [after_some_output(top_logprobs=2)])
    assert told is not None
    assert told[0] is not None
    assert told[0].top[0] == (8, 0.0)
    assert told[0].top[1][1] == -9999.0


def test_without_anyone_asking_there_are_no_logprobs() -> None:
    assert token_logprobs(some_logits(1), [0], [after_some_output()]) is None
