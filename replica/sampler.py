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

_SHORT_LIST = 1024
"""`top_p` and `min_p` rarely keep more; to sort a whole vocabulary takes many times longer than to find these."""
_LEAST_TEMPERATURE = 1e-30
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
    rows_by_length: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        if sequence.params.temperature > 0:
            rows_by_length.setdefault(_list_length(sequence.params, vocabulary), []).append(row)
    while rows_by_length:
        length, rows = rows_by_length.popitem()
        for row, token in zip(rows, _draw(scores[rows], [sequences[row] for row in rows], length), strict=True):
            if token is None:
                rows_by_length.setdefault(vocabulary, []).append(row)
            else:
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


def _list_length(params: SamplingParams, vocabulary: int) -> int:
    """How many of the likeliest tokens to list for the filters; 0: there are none, and no order is needed."""
    if 0 < params.top_k < vocabulary:
        return params.top_k
    return min(vocabulary, _SHORT_LIST) if params.top_p < 1 or params.min_p > 0 else 0


def _draw(scores: torch.Tensor, sequences: Items[Sequence], length: int) -> list[int | None]:
    """One token for each row: likeliest first, every filter keeps a beginning of the list. None if it is too short."""
    largest = scores.max(dim=-1, keepdim=True).values
    # Relative to the largest: a temperature near zero must lead to the greedy token, not to infinities.
    scale = _column([1 / max(sequence.params.temperature, _LEAST_TEMPERATURE) for sequence in sequences], scores)
    listed, ids = _likeliest(scores, length) if length else (scores, None)
    scaled = (listed - largest) * scale
    cumulative = scaled.exp().cumsum(dim=-1, dtype=torch.float64)
    kept = torch.full((len(sequences), 1), scaled.shape[-1], device=scores.device)
    too_short = [False] * len(sequences)
    if length:
        floor = _column([sequence.params.min_p for sequence in sequences], scores).log()
        kept = (scaled >= floor).sum(dim=-1, keepdim=True)
        total = cumulative.gather(1, kept - 1)
        open_ended = _open_ended(sequences, kept, length, scores)
        if open_ended.any():
            everything = (scores - largest) * scale
            weights = everything.exp().masked_fill_(everything < floor, 0)
            total = torch.where(open_ended, weights.sum(dim=-1, keepdim=True, dtype=torch.float64), total)
        share = _column([sequence.params.top_p for sequence in sequences], scores, torch.float64) * total
        reached = torch.searchsorted(cumulative, share)
        too_short = (open_ended & (reached >= length))[:, 0].tolist()
        kept = torch.minimum(kept, reached + 1)
    uniform = _column([_uniform(sequence) for sequence in sequences], scores, torch.float64)
    target = uniform * cumulative.gather(1, kept - 1)
    index = torch.minimum(torch.searchsorted(cumulative, target, right=True), kept - 1)
    drawn: list[int] = (index if ids is None else ids.gather(1, index))[:, 0].tolist()
    return [None if fails else token for token, fails in zip(drawn, too_short, strict=True)]


def _open_ended(sequences: Items[Sequence], kept: torch.Tensor, length: int, scores: torch.Tensor) -> torch.Tensor:
    """Rows whose filters keep all that is listed, and might keep more of what is not: its weight counts for `top_p`."""
    vocabulary = scores.shape[-1]
    if length == vocabulary:
        return torch.zeros_like(kept, dtype=torch.bool)
    unlimited = [float(not 0 < sequence.params.top_k < vocabulary) for sequence in sequences]
    return (kept == length) & (_column(unlimited, scores) > 0)


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


def _column(values: list[float], like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]
