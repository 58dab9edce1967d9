"""Logits -> next tokens. A seeded request draws the same tokens whoever shares its batch, preempted or not.

There is no generator to keep: the one random number that a token needs is a function of the request's seed and the
number of tokens before it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Items

import torch

from replica.runner import RunnerError
from replica.sequence import SamplingParams, Sequence

__all__ = ["sample"]


def sample(logits: torch.Tensor, sequences: Items[Sequence]) -> list[int]:
    """`logits` [sequences, vocabulary] -> one token for each. Raises RunnerError when a row holds no numbers."""
    best = logits.max(dim=-1)
    if not torch.isfinite(best.values).all():
        raise RunnerError("the model computed no usable numbers (NaN or infinity); try another dtype")
    tokens: list[int] = best.indices.tolist()
    for row, sequence in enumerate(sequences):
        if sequence.params.temperature > 0:
            tokens[row] = _draw(logits[row], sequence.params, _uniform(sequence))
    return tokens


def _uniform(sequence: Sequence) -> float:
    """A number in [0, 1)."""
    seed = sequence.params.seed
    if seed is None:
        return random.random()
    return random.Random(f"{seed}/{sequence.output_tokens}").random()


def _draw(logits: torch.Tensor, params: SamplingParams, uniform: float) -> int:
    """Temperature, then top-k, then top-p: the smallest set of likeliest tokens that holds `top_p` of the whole."""
    candidates: torch.Tensor | None = None  # None: the whole vocabulary, in its own order
    if 0 < params.top_k < logits.numel():
        logits, candidates = logits.topk(params.top_k)
    elif params.top_p < 1:
        logits, candidates = logits.sort(descending=True)
    # Subtracting the largest first: a temperature near zero must lead to the greedy token, not to infinities.
    scaled = (logits.double() - logits.max()) / params.temperature
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1)
    kept = cumulative.numel()
    if params.top_p < 1:
        kept = min(kept, int(torch.searchsorted(cumulative, params.top_p)) + 1)
    target = uniform * float(cumulative[kept - 1])
    index = min(int(torch.searchsorted(cumulative, target, right=True)), kept - 1)
    return index if candidates is None else int(candidates[index])
