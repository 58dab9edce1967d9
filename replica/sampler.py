"""Logits -> next tokens. A seeded request draws the same tokens whoever shares its batch, preempted or not.

    logits -> bias, penalties -> temperature -> min_p -> top_k -> top_p -> one draw      (vLLM's order)

There is no generator to keep: the one random number that a token needs is a function of the request's seed and the
number of tokens before it. Every operation works on rows one by one, and where tokens are equally likely the lower id
comes first: nothing depends on what stands in the other rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Items

import torch

from replica.penalties import penalized
from replica.runner import RunnerError, TokenLogprobs
from replica.sequence import SamplingParams, Sequence

__all__ = ["sample", "token_logprobs"]

_LEAST_LOGPROB = -9999.0
"""For what cannot happen: JSON has no minus infinity."""


def sample(logits: torch.Tensor, sequences: Items[Sequence]) -> list[int]:
    """`logits` [sequences, vocabulary] -> one token for each. Raises RunnerError when a row holds no numbers."""
    scores = penalized(logits, sequences)
    best = scores.max(dim=-1)
    if not torch.isfinite(best.values).all():
        raise RunnerError("the model computed no usable numbers (NaN or infinity); try another dtype")
    tokens: list[int] = best.indices.tolist()
    vocabulary = scores.shape[-1]
    rows_by_candidates: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        if sequence.params.temperature > 0:
            rows_by_candidates.setdefault(_candidates(sequence.params, vocabulary), []).append(row)
    for candidates, rows in rows_by_candidates.items():
        drawn = _draw(scores[rows], [sequences[row] for row in rows], candidates)
        for row, token in zip(rows, drawn, strict=True):
            tokens[row] = token
    return tokens


def token_logprobs(
    logits: torch.Tensor, tokens: Items[int], sequences: Items[Sequence]
) -> list[TokenLogprobs | None] | None:
    """For the rows that ask, of the `tokens` sampled; None where none does. From the logits as the model gave them."""
    wanted = {row: s.params.top_logprobs for row, s in enumerate(sequences) if s.params.top_logprobs is not None}
    if not wanted:
        return None
    shares = logits[list(wanted)].float().log_softmax(dim=-1).clamp(min=_LEAST_LOGPROB)
    picked = torch.tensor([tokens[row] for row in wanted], device=logits.device)
    chosen: list[float] = shares.gather(1, picked[:, None])[:, 0].tolist()
    top = shares.topk(min(max(wanted.values()), shares.shape[-1]))
    values, ids = top.values.tolist(), top.indices.tolist()
    result: list[TokenLogprobs | None] = [None] * len(sequences)
    for place, (row, count) in enumerate(wanted.items()):
        rivals = tuple(zip(ids[place][:count], values[place][:count], strict=True))
        result[row] = TokenLogprobs(tokens[row], chosen[place], rivals)
    return result


def _candidates(params: SamplingParams, vocabulary: int) -> int:
    """How many of the likeliest tokens the filters must look at; 0: there are no filters, and no order is needed."""
    if 0 < params.top_k < vocabulary:
        return params.top_k
    return vocabulary if params.top_p < 1 or params.min_p > 0 else 0


def _draw(scores: torch.Tensor, sequences: Items[Sequence], candidates: int) -> list[int]:
    """One token for each row. Likeliest first, every filter keeps a beginning of the row."""
    ids: torch.Tensor | None = None
    if candidates:
        scores, ids = _likeliest(scores, candidates)
    # Subtracting the largest first: a temperature near zero must lead to the greedy token, not to infinities.
    scaled = (scores.double() - scores.max(dim=-1, keepdim=True).values) / _column(
        [sequence.params.temperature for sequence in sequences], scores
    )
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1)
    kept = torch.full((len(sequences), 1), scores.shape[-1], device=scores.device)
    if candidates:
        floor = _column([sequence.params.min_p for sequence in sequences], scores).log()
        kept = (scaled >= floor).sum(dim=-1, keepdim=True)
        share = _column([sequence.params.top_p for sequence in sequences], scores) * cumulative.gather(1, kept - 1)
        kept = torch.minimum(kept, torch.searchsorted(cumulative, share) + 1)
    target = _column([_uniform(sequence) for sequence in sequences], scores) * cumulative.gather(1, kept - 1)
    index = torch.minimum(torch.searchsorted(cumulative, target, right=True), kept - 1)
    tokens: list[int] = (index if ids is None else ids.gather(1, index))[:, 0].tolist()
    return tokens


def _likeliest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` best scores of each row in falling order, and their token ids; of equals the lower id first."""
    if count == scores.shape[-1]:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values, ids
    ids = scores.topk(count).indices.sort(dim=-1).values
    values, order = scores.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _uniform(sequence: Sequence) -> float:
    """A number in [0, 1)."""
    seed = sequence.params.seed
    if seed is None:
        return random.random()
    return random.Random(f"{seed}/{sequence.output_tokens}").random()


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
