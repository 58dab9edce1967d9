"""How many KV blocks fit in the memory that is there."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from replica.kv_pool import kv_shape
from replica.model_loader import ModelLoadError

__all__ = ["available_bytes", "block_bytes", "check_host_blocks", "pool_blocks"]

_CPU_SHARE = 0.25
_CPU_LIMIT_BYTES = 4 * 2**30
"""A machine runs more than one replica, and more than replicas: without a wish, this is plenty."""
_CUDA_SHARE = 0.85
"""The rest is for activations."""
_GIB = 2**30


def block_bytes(model: PreTrainedModel, block_size: int) -> int:
    """Keys and values of all layers."""
    shape = kv_shape(model.config)
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * block_size * model.dtype.itemsize


def pool_blocks(model: PreTrainedModel, block_size: int, wanted: int | None = None) -> int:
    """`wanted` if that fits, or a fair share of the memory. Raises ModelLoadError when it does not fit."""
    available = available_bytes(model.device)
    size = block_bytes(model, block_size)
    if wanted is None:
        is_cuda = model.device.type == "cuda"
        wanted = int(available * _CUDA_SHARE if is_cuda else min(available * _CPU_SHARE, _CPU_LIMIT_BYTES)) // size
    if wanted < 1 or wanted * size > available:
        needed = max(wanted, 1) * size
        raise ModelLoadError(
            f"{max(wanted, 1)} KV blocks of {block_size} tokens need {needed / _GIB:.2f} GiB, but {model.device} has "
            f"{available / _GIB:.2f} GiB available: ask for at most {available // size} (--blocks)"
        )
    return wanted


def check_host_blocks(model: PreTrainedModel, block_size: int, wanted: int) -> None:
    """Raises ModelLoadError when so many do not fit into the host's memory."""
    available, size = available_bytes(torch.device("cpu")), block_bytes(model, block_size)
    if wanted * size > available:
        raise ModelLoadError(
            f"{wanted} KV blocks of {block_size} tokens need {wanted * size / _GIB:.2f} GiB of host memory, but "
            f"{available / _GIB:.2f} GiB are available: ask for at most {available // size} (--host-blocks)"
        )


def available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return _CPU_LIMIT_BYTES
    lines = (line.split() for line in meminfo.read_text().splitlines())
    available = next(int(fields[1]) * 1024 for fields in lines if fields[0] == "MemAvailable:")
    # A container's own limit is not in /proc/meminfo.
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (limit_bytes := limit.read_text().strip()) != "max":
        available = min(available, max(int(limit_bytes) - int(used.read_text()), 0))
    return available
