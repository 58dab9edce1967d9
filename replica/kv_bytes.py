"""The bytes of KV blocks, out of torch's pool and into it (see `kv_layout` for their order)."""

from __future__ import annotations

import json

import torch
from transformers import PretrainedConfig

from replica.kv_layout import KVLayout
from replica.kv_pool import KVPool
from replica.sequence import Sequence

__all__ = ["layout_of", "read_blocks", "write_blocks"]


def layout_of(pool: KVPool, config: PretrainedConfig) -> KVLayout:
    layers, _, kv_heads, block_size, head_dim = pool.block_shape
    rope = getattr(config, "rope_parameters", None)
    return KVLayout(
        dtype=str(pool.dtype).removeprefix("torch."),
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        rope=json.dumps(rope, sort_keys=True, default=str) if rope else "",
        block_bytes=pool.block_bytes,
    )


def read_blocks(pool: KVPool, sequence: Sequence, first: int, last: int) -> memoryview:
    blocks = torch.empty((last - first, *pool.block_shape), dtype=pool.dtype, device=pool.device)
    pool.gather(sequence.block_ids[first:last], blocks)
    block_size = pool.block_shape[-2]
    computed = sequence.computed_tokens - first * block_size
    if computed < len(blocks) * block_size:
        # What is there is somebody else's, from before, and must not leave with this sequence.
        blocks[computed // block_size, :, :, :, computed % block_size :] = 0
    return blocks.cpu().view(torch.uint8).numpy().data.cast("B")


def write_blocks(pool: KVPool, sequence: Sequence, first: int, raw: memoryview) -> None:
    blocks = torch.frombuffer(raw, dtype=pool.dtype).view(-1, *pool.block_shape)
    pool.scatter(sequence.block_ids[first : first + len(blocks)], blocks.to(pool.device))
