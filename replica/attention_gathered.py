"""The plainest paged attention: gather each sequence's context, and attend to it with a mask.

Right on every device and in every precision, and the oracle for the others.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from replica.kv_pool import KVPool
from replica.runner import Chunk

__all__ = ["GatheredAttention"]


@dataclass(frozen=True, slots=True)
class _Span:
    """Queries `rows` of the packed row are the last of the `context` tokens of one sequence."""

    rows: slice
    context: int
    blocks: torch.Tensor | range
    mask: torch.Tensor
    """[queries, context], True where a query sees."""


class GatheredAttention:
    """Fills `replica.paged_attention.Attention`."""

    def __init__(self, pool: KVPool, chunks: Items[Chunk]) -> None:
        self.chunks = list(chunks)
        self._pool = pool
        self._spans: list[_Span] = []
        first = 0
        for chunk in chunks:
            queries = chunk.end - chunk.start
            mask = torch.ones(queries, chunk.end, dtype=torch.bool, device=pool.device).tril(chunk.start)
            table = chunk.sequence.block_ids[: -(-chunk.end // pool.block_size)]
            self._spans.append(_Span(slice(first, first + queries), chunk.end, pool.blocks_of(table), mask))
            first += queries

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        attended = torch.empty_like(query)
        for span in self._spans:
            keys, values = (kv[None, :, : span.context] for kv in self._pool.read(layer, span.blocks))
            attended[:, :, span.rows] = scaled_dot_product_attention(
                query[:, :, span.rows],
                keys,
                values,
                attn_mask=span.mask,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return attended
