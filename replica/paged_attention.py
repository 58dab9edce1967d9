"""Attention over a pool of KV blocks, as one function registered with transformers under the name "paged".

    a layer's keys    [ kv heads, blocks, block size, head dim ]          values alike; a slot is block * size + offset
    a step's tokens   [ A | B | C | chunk of D ......... | chunk of E ... ]      one row, decodes and prefills mixed
                        '-------'  short decodes: one call for all of them
                                  '- span of D: its queries, and the blocks of its context

A layer first writes the step's keys and values to the pool; then every query attends to its sequence's blocks so far,
what was just written included. Sequences share blocks simply by naming the same ones. Heads come first, so that one
head's context is one piece of memory: a decode over a long context then runs up to twice as fast on a CPU.

Where a sequence's blocks lie one after another, its context is a view of the pool; else it is gathered. On CUDA the
same lines run: meant to be right, not yet fast (a paged kernel gathers nothing), and never tried on a GPU so far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig

__all__ = ["PAGED", "KVPool", "KVShape", "ShortDecodes", "Span", "Step", "UnsupportedAttentionError", "kv_shape"]

PAGED = "paged"

# What some models hand to their attention and this function does not do: to ignore it would be a wrong answer.
_UNSUPPORTED = {
    "sliding_window": "sliding-window attention",
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "position biases in attention",
}


class UnsupportedAttentionError(Exception):
    """The model attends in a way that blocks cannot serve; the message names it."""


@dataclass(frozen=True, slots=True)
class KVShape:
    layers: int
    kv_heads: int
    head_dim: int


def kv_shape(config: PretrainedConfig) -> KVShape:
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVShape(config.num_hidden_layers, kv_heads, head_dim)


@dataclass(frozen=True, slots=True)
class Span:
    """Queries `first:last` of the packed row are the last of the `context` tokens of one sequence."""

    first: int
    last: int
    context: int
    blocks: torch.Tensor | range
    """The context's blocks; a range where they lie one after another."""
    mask: torch.Tensor | None
    """[queries, context], True where a query sees; None for a lone query and for a chunk that starts its sequence."""


@dataclass(frozen=True, slots=True)
class ShortDecodes:
    """The first queries of the packed row, each alone with a short context: one call for all of them, padded."""

    blocks: torch.Tensor
    """[sequences * blocks of the longest context]; the padding names any block."""
    mask: torch.Tensor
    """[sequences, 1, 1, slots of the longest context], True where the context is."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a forward pass needs to know besides tokens and positions."""

    pool: KVPool
    slots: torch.Tensor
    """Where each packed token's key and value go."""
    decodes: ShortDecodes | None
    spans: list[Span]


class KVPool:
    """Keys and values of every layer. Memory is touched only as slots are written."""

    def __init__(
        self, shape: KVShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype, self.device = dtype, device
        self.block_shape = (shape.layers, 2, shape.kv_heads, block_size, shape.head_dim)
        """Of a block in one piece, as `gather` gives and `scatter` takes it."""
        size = (shape.kv_heads, num_blocks, block_size, shape.head_dim)
        self._keys = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.layers)]
        self._values = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.layers)]
        # Gathering into the same memory each time spares the page faults of fresh allocations, which cost more than
        # the copy itself.
        self._scratch = torch.empty(0, dtype=dtype, device=device)

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block_shape) * self.dtype.itemsize

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """All that the sources hold. No target is also a source."""
        read, written = self._index(sources), self._index(targets)
        for kv in (*self._keys, *self._values):
            kv.index_copy_(1, written, kv.index_select(1, read))

    def gather(self, blocks: list[int], out: torch.Tensor) -> None:
        """`out`: [blocks, *block_shape]."""
        index = self._index(blocks)
        for layer, pair in enumerate(zip(self._keys, self._values, strict=True)):
            for which, kv in enumerate(pair):
                out[:, layer, which] = kv.index_select(1, index).transpose(0, 1)

    def scatter(self, blocks: list[int], kv_blocks: torch.Tensor) -> None:
        """The inverse of `gather`."""
        index = self._index(blocks)
        for layer, pair in enumerate(zip(self._keys, self._values, strict=True)):
            for which, kv in enumerate(pair):
                kv.index_copy_(1, index, kv_blocks[:, layer, which].transpose(0, 1))

    def _index(self, blocks: list[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.long, device=self.device)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """`key` and `value`: [1, kv heads, tokens, head dim]."""
        self._keys[layer].flatten(1, 2).index_copy_(1, slots, key[0])
        self._values[layer].flatten(1, 2).index_copy_(1, slots, value[0])

    def read(self, layer: int, blocks: torch.Tensor | range) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of blocks, [kv heads, slots, head dim] each; good until the next call."""
        keys, values = self._keys[layer], self._values[layer]
        if isinstance(blocks, range):
            run = slice(blocks.start, blocks.stop)
            return keys[:, run].flatten(1, 2), values[:, run].flatten(1, 2)
        kv_heads, _, block_size, head_dim = keys.shape
        shape = (2, kv_heads, blocks.numel(), block_size, head_dim)
        size = math.prod(shape)
        if self._scratch.numel() < size:
            self._scratch = self._scratch.new_empty(size)
        gathered = self._scratch[:size].view(shape)
        torch.index_select(keys, 1, blocks, out=gathered[0])
        torch.index_select(values, 1, blocks, out=gathered[1])
        return gathered[0].flatten(1, 2), gathered[1].flatten(1, 2)


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    step: Step,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """`query` [1, heads, tokens, head dim], `key` and `value` [1, kv heads, tokens, head dim]: the packed step's."""
    _refuse_unsupported(module, attention_mask, others)
    layer = cast(int, module.layer_idx)
    pool = step.pool
    pool.write(layer, step.slots, key, value)
    attended = torch.empty_like(query)
    if step.decodes:
        sequences = len(step.decodes.mask)
        keys, values = (
            kv.view(kv.shape[0], sequences, -1, kv.shape[-1]).transpose(0, 1)
            for kv in pool.read(layer, step.decodes.blocks)
        )
        attended[0, :, :sequences] = _attend_alone(query[0, :, :sequences], keys, values, step.decodes.mask, scaling)
    for span in step.spans:
        keys, values = (kv[None, :, : span.context] for kv in pool.read(layer, span.blocks))
        rows = slice(span.first, span.last)
        if span.last - span.first == 1:
            attended[0, :, rows] = _attend_alone(query[0, :, rows], keys, values, None, scaling)
        else:
            attended[:, :, rows] = scaled_dot_product_attention(
                query[:, :, rows],
                keys,
                values,
                attn_mask=span.mask,
                is_causal=span.mask is None,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
    return attended.transpose(1, 2), None


def _attend_alone(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """One query a sequence: `query` [heads, sequences, head dim], `keys` [sequences, kv heads, context, head dim].

    The query heads that share a kv head stand as queries of that head, which is therefore read once.
    """
    heads, sequences, head_dim = query.shape
    grouped = query.transpose(0, 1).reshape(sequences, keys.shape[1], -1, head_dim)
    attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return attended.reshape(sequences, heads, head_dim).transpose(0, 1)


def _refuse_unsupported(
    module: torch.nn.Module, attention_mask: torch.Tensor | None, others: Mapping[str, object]
) -> None:
    for name, what in _UNSUPPORTED.items():
        if others.get(name) is not None:
            raise UnsupportedAttentionError(what)
    if attention_mask is not None:
        raise UnsupportedAttentionError("an attention mask of its own")
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise UnsupportedAttentionError("attention that is not causal")


AttentionInterface.register(PAGED, _paged_attention)
