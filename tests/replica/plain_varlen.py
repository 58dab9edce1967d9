"""What `torch.nn.attention.varlen.varlen_attn` computes, written out for a CPU, and as strict about its arguments.

It takes the kernel's place in `attention_varlen`, so that all around the kernel is tested without a GPU.
"""

from __future__ import annotations

from itertools import pairwise

import torch

__all__ = ["plain_varlen"]


def plain_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor | None,
) -> torch.Tensor:
    _check(query, key, cu_seq_q, cu_seq_k, seqused_k, block_table)
    assert window_size == (-1, 0)
    starts_q, starts_k, contexts = cu_seq_q.tolist(), cu_seq_k.tolist(), seqused_k.tolist()
    assert (starts_q[0], starts_q[-1]) == (0, query.shape[0])
    assert max_q == max(b - a for a, b in pairwise(starts_q))
    assert max_k == max(b - a for a, b in pairwise(starts_k))
    assert enable_gqa == (query.shape[1] != key.shape[-2])
    output = torch.empty_like(query)
    for number, context in enumerate(contexts):
        rows = slice(starts_q[number], starts_q[number + 1])
        if block_table is None:
            slots = slice(starts_k[number], starts_k[number] + context)
            assert slots.stop <= starts_k[number + 1] <= key.shape[0]
            keys, values = key[slots], value[slots]
        else:
            pages = block_table[number, : -(-context // key.shape[1])]
            keys, values = (kv[pages].flatten(0, 1)[:context] for kv in (key, value))
        output[rows] = _attend(query[rows], keys, values, scale)
    return output


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor | None,
) -> None:
    assert query.dim() == 3
    assert query.is_contiguous()
    assert key.stride(-1) == 1
    sequences = len(seqused_k)
    assert len(cu_seq_q) == len(cu_seq_k) == sequences + 1
    assert {index.dtype for index in (cu_seq_q, cu_seq_k, seqused_k)} == {torch.int32}
    if block_table is None:
        assert key.dim() == 3
    else:
        assert key.dim() == 4
        assert key.shape[1] % 256 == 0
        assert (block_table.dtype, block_table.shape[0]) == (torch.int32, sequences)


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None) -> torch.Tensor:
    """`query` [queries, heads, head dim]: the last of the sequence whose `keys` are [context, kv heads, head dim]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (kv.repeat_interleave(group, 1).float() for kv in (keys, values))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * factor
    hidden = torch.ones(scores.shape[1:]).triu(keys.shape[0] - query.shape[0] + 1).bool()
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
