"""Attention over a pool of KV blocks, as one function registered with transformers under the name "paged".

    a step's tokens   [ A | B | C | chunk of D ......... | chunk of E ... ]      one row, decodes and prefills mixed

A layer first writes the step's keys and values to the pool; then every query attends to its sequence's blocks so far,
what was just written included. Sequences share blocks simply by naming the same ones. How they attend is up to one of

    attention_gathered   the reference: every context is gathered, everywhere
    attention_cascade    on a CPU: contexts are views of the pool, and what decodes share is read once
    attention_varlen     on CUDA, in half precision: one kernel for the whole step, over pages
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from transformers import AttentionInterface

from replica import attention_cascade, attention_varlen
from replica.attention_cascade import CascadeAttention
from replica.attention_gathered import GatheredAttention
from replica.attention_varlen import VarlenAttention
from replica.kv_pool import KVPool
from replica.runner import Chunk

__all__ = ["PAGED", "Attention", "Step", "UnsupportedAttentionError", "attention_for"]

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


class Attention(Protocol):
    """That of one step, for every layer."""

    chunks: list[Chunk]
    """The step's, in the order in which their tokens must be packed."""

    def __init__(self, pool: KVPool, chunks: Items[Chunk]) -> None: ...

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """`query` [1, heads, tokens, head dim] -> the same shape. `key` and `value` are the step's, and in the pool."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """What a forward pass needs to know besides tokens and positions."""

    pool: KVPool
    slots: torch.Tensor
    """Where each packed token's key and value go."""
    attention: Attention


def attention_for(pool: KVPool) -> type[Attention]:
    """The fastest that this pool and this release of torch allow."""
    if attention_varlen.serves(pool):
        return VarlenAttention
    if attention_cascade.serves(pool):
        return CascadeAttention
    return GatheredAttention


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
    step.pool.write(layer, step.slots, key, value)
    return step.attention.attend(layer, query, key, value, scaling).transpose(1, 2), None


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
