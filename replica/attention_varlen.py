"""Paged attention on CUDA, in half precision: one kernel call a layer for the whole step, decodes and prefills alike.

    cu_seq_q      [ 0 | 1 | 2 | 40 ]            where each sequence's queries begin in the packed row
    seqused_k     [ 700 | 31 | 38 ]             tokens of its context; its queries are the last of them (causal)
    block_table   [ 5 6 7 | 9 - - | 4 - - ]     its pages, padded

Blocks of a multiple of 256 tokens are the kernel's pages, and nothing is copied. Smaller blocks (the default) are first
gathered side by side, which costs one more reading and writing of the contexts; then `cu_seq_k` says where each begins.

No GPU has run this so far. What is tested without one: every index and every shape, with a plain function in the
kernel's place. `make gpu-check` tests the rest where there is a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from replica.kv_pool import KVPool
from replica.runner import Chunk

__all__ = ["PAGE_TOKENS", "Layout", "VarlenAttention", "layout_of", "serves"]

PAGE_TOKENS = 256
"""What the kernel's pages must be a multiple of."""
_WIDEST_HEAD = 256
_AMPERE = (8, 0)
_HALF = (torch.float16, torch.bfloat16)


def _find_kernel() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    needed = {"scale", "window_size", "enable_gqa", "seqused_k", "block_table"}
    return varlen_attn if needed <= set(inspect.signature(varlen_attn).parameters) else None


_kernel = _find_kernel()


def serves(pool: KVPool) -> bool:
    head_dim = pool.block_shape[-1]
    return (
        _kernel is not None
        and pool.dtype in _HALF
        and head_dim % 8 == 0
        and head_dim <= _WIDEST_HEAD
        and pool.device.type == "cuda"
        and torch.cuda.get_device_capability(pool.device) >= _AMPERE
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """Of a step's queries and contexts. All tensors int32 (`gathered`: int64), on the device they were asked for."""

    cu_seq_q: torch.Tensor
    cu_seq_k: torch.Tensor
    seqused_k: torch.Tensor
    most_queries: int
    longest_context: int
    block_table: torch.Tensor | None
    """[sequences, pages of the longest context], where blocks are pages."""
    gathered: torch.Tensor | None
    """All blocks of all contexts, one after another, where they are not."""


def layout_of(chunks: Items[Chunk], block_size: int, device: torch.device) -> Layout:
    tables = [chunk.sequence.block_ids[: -(-chunk.end // block_size)] for chunk in chunks]
    queries = [chunk.end - chunk.start for chunk in chunks]
    contexts = [chunk.end for chunk in chunks]
    is_paged = block_size % PAGE_TOKENS == 0
    # In a gathered context, the last block's free slots follow the last token: `seqused_k` leaves them out.
    lengths = contexts if is_paged else [len(table) * block_size for table in tables]
    most_pages = max(map(len, tables))

    def ints(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Layout(
        cu_seq_q=ints([0, *accumulate(queries)]),
        cu_seq_k=ints([0, *accumulate(lengths)]),
        seqused_k=ints(contexts),
        most_queries=max(queries),
        longest_context=max(lengths),
        block_table=ints([table + [0] * (most_pages - len(table)) for table in tables]) if is_paged else None,
        gathered=None if is_paged else ints([block for table in tables for block in table], torch.long),
    )


class VarlenAttention:
    """Fills `replica.paged_attention.Attention`."""

    def __init__(self, pool: KVPool, chunks: Items[Chunk]) -> None:
        self.chunks = list(chunks)
        self._pool = pool
        self._layout = layout_of(chunks, pool.block_size, pool.device)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        assert _kernel is not None, "chosen only where torch has the kernel"
        layout = self._layout
        keys, values = self._pool.pages(layer)
        if layout.gathered is not None:
            keys, values = (kv.index_select(0, layout.gathered).flatten(0, 1) for kv in (keys, values))
        output: torch.Tensor = _kernel(
            query[0].transpose(0, 1).contiguous(),
            keys,
            values,
            layout.cu_seq_q,
            layout.cu_seq_k,
            layout.most_queries,
            layout.longest_context,
            scale=scaling,
            window_size=(-1, 0),  # causal
            enable_gqa=query.shape[1] != key.shape[1],
            seqused_k=layout.seqused_k,
            block_table=layout.block_table,
        )
        return output.transpose(0, 1)[None]
