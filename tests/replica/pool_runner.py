"""A runner whose answers depend on every KV slot a sequence reads, and the oracle that needs no slots at all.

    slot[p] = hash(slot[p - 1], token[p])        written once, as a model writes K and V that depend on all before
    next    = hash(all slots 0..p) % vocab       read through the block table, whoever wrote them

A block shared wrongly, overwritten or given away too early changes the answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Items

from replica.runner import Chunk, StepResult
from replica.sequence import SamplingParams, Sequence
from shared.blocks import BlockKey

__all__ = ["ROOT", "PoolRunner", "answer_to", "make_sequence"]

ROOT = BlockKey(b"r" * 16)

_numbers = itertools.count()


class PoolRunner:
    def __init__(self, num_blocks: int, block_size: int, vocab: int = 50) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab = vocab
        self.steps: list[list[tuple[str, int, int]]] = []
        self.forgotten: list[str] = []
        self._slots = [0] * (num_blocks * block_size)

    def execute(self, chunks: Items[Chunk]) -> StepResult:
        self.steps.append([(chunk.sequence.request_id, chunk.start, chunk.end) for chunk in chunks])
        for chunk in chunks:
            self._write(chunk)
        sampled = [self._sample(chunk) if chunk.samples else None for chunk in chunks]
        return StepResult(sampled, 0.001)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)

    def _write(self, chunk: Chunk) -> None:
        for position in range(chunk.start, chunk.end):
            before = self._slots[self._slot(chunk.sequence, position - 1)] if position else 0
            self._slots[self._slot(chunk.sequence, position)] = hash((before, chunk.sequence.tokens[position]))

    def _sample(self, chunk: Chunk) -> int:
        return _choose([self._slots[self._slot(chunk.sequence, p)] for p in range(chunk.end)], self.vocab)

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.block_ids[position // self.block_size] * self.block_size + position % self.block_size


def answer_to(prompt: list[int], max_tokens: int, vocab: int = 50) -> list[int]:
    """What an engine without any cache, pool or batch says."""
    slots: list[int] = []
    tokens = list(prompt)
    for position in range(len(prompt) + max_tokens):
        if position >= len(prompt):
            tokens.append(_choose(slots, vocab))
        slots.append(hash((slots[-1] if slots else 0, tokens[position])))
    return tokens[len(prompt) :]


def make_sequence(prompt: list[int], max_tokens: int = 4, *, root: BlockKey = ROOT, **params: object) -> Sequence:
    settings = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return Sequence(f"q{next(_numbers)}", list(prompt), len(prompt), settings, root)


def _choose(slots: list[int], vocab: int) -> int:
    return hash(tuple(slots)) % vocab
