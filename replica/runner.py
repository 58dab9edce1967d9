"""The seat between scheduler and hardware. `model_runner` fills it with torch, `simulated_runner` with a cost model.

A step is a list of chunks, prefill and decode mixed; after it, every token of every chunk is in the KV pool, and each
chunk that reaches the end of its sequence yields one sampled token.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from replica.block_moves import Mover
from replica.kv_layout import BlockAccess
from replica.sequence import Sequence

__all__ = ["Chunk", "Runner", "RunnerError", "StepResult", "TokenLogprobs"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute `sequence.tokens[start:end]`; their blocks are allocated. Samples when it ends at `len(tokens)`.

    `sequence.block_ids` is right for this step alone: equal blocks become one between steps.
    """

    sequence: Sequence
    start: int
    end: int

    @property
    def samples(self) -> bool:
        return self.end == len(self.sequence.tokens)

    @property
    def token_context(self) -> float:
        """Tokens times the context that each attends to, on average the middle of the chunk: attention's work."""
        return (self.end - self.start) * (self.start + self.end + 1) / 2


class TokenLogprobs(NamedTuple):
    """How likely the model itself found a sampled token and its likeliest rivals, before penalties and temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """Token ids and their log probabilities, likeliest first; the sampled one need not be among them."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """`sampled[i]` is the next token of chunk i, or None where the chunk does not reach its sequence's end."""

    sampled: list[int | None]
    seconds: float
    """How long the step took (measured), or takes (from the cost model)."""
    logprobs: list[TokenLogprobs | None] | None = None
    """For each chunk, where its sequence asks for them; None where no sequence of the step does."""


class Runner(Mover, BlockAccess, Protocol):
    """Owns the KV pool of `num_blocks` blocks of `block_size` tokens, and the host pool. Called by one thread only.

    Before each step it is told which blocks move (see `block_moves`).
    """

    num_blocks: int
    block_size: int
    host_blocks: int

    def execute(self, chunks: Items[Chunk]) -> StepResult:
        """One forward pass. Raises RunnerError with a message for the operator when the step cannot be done."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a sequence that ended (its random generator); unknown ids are fine."""
        ...


class RunnerError(Exception):
    """The step failed. Its sequences end with an error; the engine goes on."""
