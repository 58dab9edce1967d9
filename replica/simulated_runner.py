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

from replica.block_moves import Copy, Offload, Onload
from replica.kv_layout import KVLayout
from replica.runner import Chunk, RunnerError, StepResult, TokenLogprobs
from replica.sequence import Sequence

__all__ = ["SimulatedCost", "SimulatedRunner"]

_SEEN_TOKENS = 16
_BLOCK_BYTES = 16


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
    per_transferred_token_seconds: float = 5e-6
    """Per token whose KV crosses between device and host: 128 KiB at 25 GB/s."""

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
        host_blocks: int = 0,
    ) -> None:
        if not vocab:
            raise ValueError("the simulated engine needs at least one token to answer with")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.host_blocks = host_blocks
        self.kv_layout = KVLayout(
            dtype="simulated",
            layers=1,
            kv_heads=1,
            head_dim=1,
            block_size=block_size,
            rope="",
            block_bytes=_BLOCK_BYTES,
        )
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

    def copy_blocks(self, moves: Items[Copy]) -> None:
        """There is nothing to copy, and copying within a device takes no time worth counting."""

    def offload_blocks(self, moves: Items[Offload]) -> float:
        return self._transfer(len(moves))

    def onload_blocks(self, moves: Items[Onload]) -> float:
        return self._transfer(len(moves))

    def read_blocks(self, sequence: Sequence, first: int, last: int) -> memoryview:
        """A digest of each block's tokens and place, which tells what KV it would be."""
        return memoryview(bytearray().join(self._digest(sequence, block) for block in range(first, last)))

    def write_blocks(self, sequence: Sequence, first: int, raw: memoryview) -> None:
        """Raises RunnerError for what was not read from a sequence of the same tokens."""
        expected = b"".join(self._digest(sequence, first + number) for number in range(len(raw) // _BLOCK_BYTES))
        if raw != expected:
            raise RunnerError("this KV belongs to other tokens")

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""

    def _transfer(self, blocks: int) -> float:
        seconds = blocks * self.block_size * self._cost.per_transferred_token_seconds
        if not self._virtual:
            self._sleep(time.perf_counter(), seconds)
        return seconds

    def _digest(self, sequence: Sequence, block: int) -> bytes:
        start = block * self.block_size
        tokens = array("I", sequence.tokens[start : start + self.block_size]).tobytes()
        return xxhash.xxh3_128_digest(tokens, seed=start)

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
