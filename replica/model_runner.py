"""A transformers model in the runner's seat: prefill and decode of many sequences in one forward pass.

The chunks of a step are packed into one row of tokens, without padding; only attention tells the sequences apart
(`paged_attention`). Logits are computed for the last token of the chunks that sample, and for no other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from replica.block_moves import Copy, Offload, Onload
from replica.host_pool import HostPool
from replica.kv_bytes import layout_of, read_blocks, write_blocks
from replica.kv_pool import KVPool, kv_shape
from replica.paged_attention import PAGED, Attention, Step, attention_for
from replica.runner import Chunk, RunnerError, StepResult
from replica.sampler import sample, token_logprobs
from replica.sequence import Sequence

__all__ = ["ModelRunner"]

_T = TypeVar("_T")


class ModelRunner:
    """Takes `model` over: its attention is the paged one from here on. Fills `replica.runner.Runner`.

    `attention` is the fastest one for the device, unless a test or a measurement asks for another.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_blocks: int,
        block_size: int,
        host_blocks: int = 0,
        attention: type[Attention] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.host_blocks = host_blocks
        self._model = model
        self._pool = KVPool(
            kv_shape(model.config),
            num_blocks,
            block_size,
            model.dtype,
            model.device,
            heads_first=model.device.type != "cuda",
        )
        self._attention = attention or attention_for(self._pool)
        self._host_pool = HostPool(self._pool, host_blocks)
        self.kv_layout = layout_of(self._pool, model.config)
        model.set_attn_implementation(PAGED)

    def execute(self, chunks: Items[Chunk]) -> StepResult:
        started = time.perf_counter()
        sampling = [chunk for chunk in chunks if chunk.samples]
        try:
            with torch.inference_mode():
                logits = self.logits(chunks)
                sequences = [chunk.sequence for chunk in sampling]
                tokens = sample(logits, sequences) if sampling else []
                told = token_logprobs(logits, tokens, sequences)
            if not sampling and self._pool.device.type == "cuda":
                torch.cuda.synchronize(self._pool.device)  # else the next step would pay for this one
        except (RuntimeError, IndexError) as error:  # torch's own: out of memory, a token beyond the vocabulary
            raise RunnerError(f"the forward pass failed: {str(error).splitlines()[0]}") from error
        logprobs = None if told is None else _at_their_chunks(chunks, told)
        return StepResult(_at_their_chunks(chunks, tokens), time.perf_counter() - started, logprobs)

    @torch.inference_mode()
    def copy_blocks(self, moves: Items[Copy]) -> None:
        self._pool.copy_blocks([move.source for move in moves], [move.target for move in moves])

    @torch.inference_mode()
    def offload_blocks(self, moves: Items[Offload]) -> float:
        return self._host_pool.offload(moves)

    @torch.inference_mode()
    def onload_blocks(self, moves: Items[Onload]) -> float:
        return self._host_pool.onload(moves)

    @torch.inference_mode()
    def read_blocks(self, sequence: Sequence, first: int, last: int) -> memoryview:
        return read_blocks(self._pool, sequence, first, last)

    @torch.inference_mode()
    def write_blocks(self, sequence: Sequence, first: int, raw: memoryview) -> None:
        write_blocks(self._pool, sequence, first, raw)

    def forget(self, request_id: str) -> None:
        """Nothing is kept for a sequence: its blocks belong to the prefix cache, and sampling has no state."""

    @torch.inference_mode()
    def logits(self, chunks: Items[Chunk]) -> torch.Tensor:
        """Compute the chunks, and return [chunks that sample, vocabulary]."""
        attention = self._attention(self._pool, chunks)
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last_row: dict[str, int] = {}
        for chunk in attention.chunks:
            tokens += chunk.sequence.tokens[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            slots += self._slots(chunk)
            last_row[chunk.sequence.request_id] = len(tokens) - 1
        # Small tensors cost by their number, above all on their way to a GPU.
        packed = self._pool.index([*tokens, *positions, *slots]).view(3, len(tokens))
        output = self._model(
            input_ids=packed[None, 0],
            position_ids=packed[None, 1],
            use_cache=False,
            logits_to_keep=self._pool.index([last_row[chunk.sequence.request_id] for chunk in chunks if chunk.samples]),
            step=Step(self._pool, packed[2], attention),
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _slots(self, chunk: Chunk) -> list[int]:
        size, block_ids = self.block_size, chunk.sequence.block_ids
        return [block_ids[index // size] * size + index % size for index in range(chunk.start, chunk.end)]


def _at_their_chunks(chunks: Items[Chunk], of_sampling: Items[_T | None]) -> list[_T | None]:
    """What belongs to the chunks that sample, with None for those that do not."""
    rest = iter(of_sampling)
    return [next(rest) if chunk.samples else None for chunk in chunks]
