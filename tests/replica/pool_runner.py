"""A runner whose answers depend on every KV slot a sequence reads, and the oracle that needs no slots at all.

    slot[p] = hash(slot[p - 1], token[p])        written once, as a model writes K and V that depend on all before
    next    = hash(all slots 0..p) % vocab       read through the block table, whoever wrote them

A block shared wrongly, overwritten or given away too early changes the answer. So does one that moves too late, or with
less than it should.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence as Items

from replica.block_moves import Copy, Offload, Onload
from replica.kv_layout import KVLayout
from replica.runner import Chunk, Runner, StepResult
from replica.sequence import SamplingParams, Sequence
from shared.blocks import BlockKey

__all__ = ["ROOT", "PoolRunner", "RunnerAround", "answer_to", "make_sequence"]

ROOT = BlockKey(b"r" * 16)

_numbers = itertools.count()


class PoolRunner:
    def __init__(self, num_blocks: int, block_size: int, vocab: int = 50, host_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.host_blocks = host_blocks
        self.vocab = vocab
        self.kv_layout = KVLayout(
            dtype="simulated",
            layers=1,
            kv_heads=1,
            head_dim=1,
            block_size=block_size,
            rope="",
            block_bytes=8 * block_size,
        )
        self.steps: list[list[tuple[str, int, int]]] = []
        self.forgotten: list[str] = []
        self._slots = [0] * (num_blocks * block_size)
        self._host_slots = [0] * (host_blocks * block_size)

    def execute(self, chunks: Items[Chunk]) -> StepResult:
        self.steps.append([(chunk.sequence.request_id, chunk.start, chunk.end) for chunk in chunks])
        for chunk in chunks:
            self._write(chunk)
        sampled = [self._sample(chunk) if chunk.samples else None for chunk in chunks]
        return StepResult(sampled, 0.001)

    def copy_blocks(self, moves: Items[Copy]) -> None:
        for source, target, tokens in moves:
            self._slots[self._of(target)] = self._slots[self._of(source)][:tokens] + [0] * (self.block_size - tokens)

    def offload_blocks(self, moves: Items[Offload]) -> float:
        for source, target in moves:
            self._host_slots[self._of(target)] = self._slots[self._of(source)]
        return 0.001

    def onload_blocks(self, moves: Items[Onload]) -> float:
        for source, target in moves:
            self._slots[self._of(target)] = self._host_slots[self._of(source)]
        return 0.001

    def read_blocks(self, sequence: Sequence, first: int, last: int) -> memoryview:
        slots = [slot for block in sequence.block_ids[first:last] for slot in self._slots[self._of(block)]]
        computed = max(0, sequence.computed_tokens - first * self.block_size)
        slots[computed:] = [0] * len(slots[computed:])
        return memoryview(bytearray(array("q", slots).tobytes()))

    def write_blocks(self, sequence: Sequence, first: int, raw: memoryview) -> None:
        slots = list(raw.cast("q"))
        for index, start in enumerate(range(0, len(slots), self.block_size)):
            self._slots[self._of(sequence.block_ids[first + index])] = slots[start : start + self.block_size]

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)

    def _of(self, block: int) -> slice:
        return slice(block * self.block_size, (block + 1) * self.block_size)

    def _write(self, chunk: Chunk) -> None:
        for position in range(chunk.start, chunk.end):
            before = self._slots[self._slot(chunk.sequence, position - 1)] if position else 0
            self._slots[self._slot(chunk.sequence, position)] = hash((before, chunk.sequence.tokens[position]))

    def _sample(self, chunk: Chunk) -> int:
        return _choose([self._slots[self._slot(chunk.sequence, p)] for p in range(chunk.end)], self.vocab)

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.block_ids[position // self.block_size] * self.block_size + position % self.block_size


class RunnerAround:
    """Another runner, so that a test changes one of its methods."""

    def __init__(self, runner: Runner) -> None:
        self.num_blocks, self.block_size, self.host_blocks = runner.num_blocks, runner.block_size, runner.host_blocks
        self._runner = runner
        self.copy_blocks = runner.copy_blocks
        self.offload_blocks = runner.offload_blocks
        self.onload_blocks = runner.onload_blocks
        self.kv_layout = runner.kv_layout
        self.read_blocks = runner.read_blocks
        self.write_blocks = runner.write_blocks
        self.forget = runner.forget

    def execute(self, chunks: Items[Chunk]) -> StepResult:
        return self._runner.execute(chunks)


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
