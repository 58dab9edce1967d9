"""The seat of `model_runner`, filled by a cost model: same scheduler, same cache, no tensors, no torch.

Tokens depend on a sequence's own last tokens and length alone, so an answer is the same wherever and in whatever
batch it is computed, and however it is to be sampled: each token is certain, and its log probability 0.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass

import xxhash

from replica.runner import Chunk, StepResult, TokenLogprobs
from replica.sequence import Sequence

__all__ = ["SimulatedCost", "SimulatedRunner"]

_SEEN_TOKENS = 16


@dataclass(frozen=True, slots=True)
class SimulatedCost:
    """Seconds of a step. The defaults stand for an 8-billion-parameter model on one data-centre GPU."""

    base_seconds: float = 0.008
    per_token_seconds: float = 5e-5
    """Per token of a chunk with more than one."""
    per_token_context_seconds: float = 1e-9
    """Per token and token it attends to, decodes too."""
    per_decode_seconds: float = 5e-5
    """Per chunk of one token."""

    def step_seconds(self, chunks: Items[Chunk]) -> float:
        seconds = self.base_seconds
        for chunk in chunks:
            tokens = chunk.end - chunk.start
            seconds += self.per_decode_seconds if tokens == 1 else tokens * self.per_token_seconds
            seconds += chunk.token_context * self.per_token_context_seconds
        return seconds


class SimulatedRunner:
    """`vocab` lists the token ids that answers are made of. Sleeps as long as a step takes unless `virtual`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        cost: SimulatedCost | None = None,
        vocab: Items[int] = range(1000),
        *,
        virtual: bool = False,
    ) -> None:
        if not vocab:
            raise ValueError("the simulated engine needs at least one token to answer with")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._cost = cost or SimulatedCost()
        self._vocab = vocab
        self._virtual = virtual
        self._late_seconds = 0.0

    def execute(self, chunks: Items[Chunk]) -> StepResult:
        seconds = self._cost.step_seconds(chunks)
        began = time.perf_counter()
        sampled = [self._next_token(chunk.sequence) if chunk.samples else None for chunk in chunks]
        if not self._virtual:
            self._sleep(began, seconds)
        logprobs = [
            None if token is None else _certain(token, chunk) for token, chunk in zip(sampled, chunks, strict=True)
        ]
        return StepResult(sampled, seconds, logprobs)

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""

    def _next_token(self, sequence: Sequence) -> int:
        seen = array("I", sequence.tokens[-_SEEN_TOKENS:]).tobytes()
        return self._vocab[xxhash.xxh3_64_intdigest(seen, seed=len(sequence.tokens)) % len(self._vocab)]

    def _sleep(self, began: float, seconds: float) -> None:
        # The system wakes sleepers late; what one step is late, the next sleeps less, so that the mean is right.
        due = began + seconds - self._late_seconds
        time.sleep(max(0.0, due - time.perf_counter()))
        self._late_seconds = min(time.perf_counter() - due, seconds)


def _certain(token: int, chunk: Chunk) -> TokenLogprobs | None:
    wanted = chunk.sequence.params.top_logprobs
    return None if wanted is None else TokenLogprobs(token, 0.0, ((token, 0.0),)[:wanted])
