"""What a request adds to and takes from its logits: bias first, then penalties, in vLLM's order.

    bias        logit + bias[token]
    repetition  logit / r where it is positive, logit * r where it is not    tokens of prompt and output
    frequency   logit - f * times seen                                       tokens of the output
    presence    logit - p                                                    tokens of the output

Repetition is as Keskar et al. (2019) and `transformers` have it, the other two as in OpenAI's API.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items

import torch

from replica.sequence import Sequence

__all__ = ["penalized"]


def penalized(logits: torch.Tensor, sequences: Items[Sequence]) -> torch.Tensor:
    """`logits` [sequences, vocabulary] as the requests want them: the same tensor where none wants anything."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.params.changes_logits]
    if not rows:
        return logits
    scores = logits.to(torch.float32, copy=True)
    for row in rows:
        _penalize(scores[row], sequences[row])
    return scores


def _penalize(scores: torch.Tensor, sequence: Sequence) -> None:
    """In place; each row by itself, so that its neighbours cannot matter."""
    params = sequence.params
    # A tokenizer may know more tokens than the model: those are never sampled, whatever their bias.
    biases = {token: bias for token, bias in params.logit_bias.items() if token < scores.numel()}
    if biases:
        scores[_tensor(list(biases), scores)] += _values(list(biases.values()), scores)
    if params.repetition_penalty != 1:
        ids = _tensor(list(set(sequence.tokens)), scores)
        seen = scores[ids]
        penalty = params.repetition_penalty
        scores[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if params.frequency_penalty or params.presence_penalty:
        counts = Counter(sequence.tokens[sequence.prompt_tokens :])
        taken = [params.frequency_penalty * count + params.presence_penalty for count in counts.values()]
        scores[_tensor(list(counts), scores)] -= _values(taken, scores)


def _values(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def _tensor(ids: list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.long, device=like.device)
