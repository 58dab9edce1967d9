from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from replica.runner import RunnerError
from replica.sampler import sample
from tests.replica.tiny_zoo import make_sequence

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5])


def drawn(count: int = 3000, **params: Any) -> Counter[int]:
    sequences = [make_sequence([1], **{"temperature": 1.0, "seed": seed, **params}) for seed in range(count)]
    return Counter(sample(LOGITS.expand(count, -1), sequences))


def test_temperature_zero_takes_the_best_token_whatever_the_filters() -> None:
    assert sample(LOGITS[None], [make_sequence([1], temperature=0.0, top_p=0.1, top_k=3)]) == [1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float) -> None:
    counts = drawn(temperature=temperature)

    for token, probability in enumerate((LOGITS / temperature).softmax(-1).tolist()):
        assert counts[token] / 3000 == pytest.approx(probability, abs=0.03)


def test_a_temperature_near_zero_is_greedy_and_not_a_division_by_zero() -> None:
    assert drawn(20, temperature=1e-300) == {1: 20}


def test_top_k_keeps_the_k_likeliest_tokens() -> None:
    assert set(drawn(top_k=2)) == {1, 4}
    assert set(drawn(top_k=1)) == {1}
    assert set(drawn(top_k=99)) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_fewest_likeliest_tokens_that_reach_it() -> None:
    # Shares: token 1 has 0.47, token 4 has 0.28, token 2 has 0.17.
    assert set(drawn(top_p=0.4)) == {1}
    assert set(drawn(top_p=0.5)) == {1, 4}
    assert set(drawn(top_p=0.8)) == {1, 4, 2}
    assert set(drawn(top_p=1e-9)) == {1}


def test_top_p_counts_its_share_among_what_top_k_left() -> None:
    # Of the two that are left, token 1 alone has 0.62.
    assert set(drawn(top_k=2, top_p=0.6)) == {1}
    assert set(drawn(top_k=2, top_p=0.7)) == {1, 4}


def test_a_seed_draws_the_same_token_alone_and_among_others() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    mine = make_sequence([1], temperature=1.0, seed=5)
    others = [make_sequence([1], temperature=1.0, seed=seed) for seed in (6, None, 5)]

    alone = sample(logits[:1], [mine])
    among = sample(logits[[1, 2, 0, 3]], [others[0], others[1], mine, others[2]])

    assert among[2] == alone[0]


def test_each_token_of_an_answer_is_drawn_anew() -> None:
    sequence = make_sequence([1], temperature=1.0, seed=5)
    logits = torch.zeros(1, 1000)
    for _ in range(20):
        sequence.tokens += sample(logits, [sequence])

    assert len(set(sequence.tokens)) > 15


def test_without_a_seed_answers_differ() -> None:
    sequences = [make_sequence([1], temperature=1.0) for _ in range(20)]

    assert len(set(sample(torch.zeros(20, 1000), sequences))) > 10


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error_and_not_a_token(bad: float) -> None:
    logits = torch.zeros(2, 10)
    logits[1, 3] = bad

    with pytest.raises(RunnerError, match="dtype"):
        sample(logits, [make_sequence([1]), make_sequence([1])])
