"""How many KV blocks a model's device has room for, where the operator does not say."""

from __future__ import annotations

import os

import torch
from transformers import PreTrainedModel

from replica.paged_attention import kv_shape

__all__ = ["blocks_that_fit"]

_CUDA_SHARE = 0.8
"""Of what is free once the weights are there: the rest is for activations."""
_CPU_SHARE = 0.125
_CPU_MOST_BYTES = 2 * 2**30
"""Other replicas and programs live in the same memory."""


def blocks_that_fit(model: PreTrainedModel, block_size: int) -> int:
    shape = kv_shape(model.config)
    token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * model.dtype.itemsize
    return max(1, _budget_bytes(model.device) // (token_bytes * block_size))


def _budget_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(available * _CPU_SHARE), _CPU_MOST_BYTES)
