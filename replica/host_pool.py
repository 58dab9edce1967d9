"""The tensors of the host tier: KV blocks in host memory, each in one piece so that it crosses the bus in one piece.

    device, each layer   [ kv heads, blocks, block size, head dim ]                   keys, and values
    staging, host pool   [ blocks, layers, keys and values, kv heads, block size, head dim ]

    offload   device --gather--> staging (on the device) --one copy a block--> host pool         onload the other way

Host memory is pinned where the device is CUDA. Staging is taken once: moving blocks needs no memory when there is none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import TypeVar

import torch

from replica.block_moves import Offload, Onload
from replica.kv_pool import KVPool

__all__ = ["HostPool"]

_STAGING_BYTES = 128 * 2**20

_T = TypeVar("_T", Offload, Onload)


class HostPool:
    """Room for `num_blocks` blocks of `pool`. Each transfer returns the seconds it took, and is done by then."""

    def __init__(self, pool: KVPool, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pool = pool
        self._device = pool.device
        staged = max(1, min(num_blocks, _STAGING_BYTES // pool.block_bytes))
        self._staging = torch.empty((staged, *pool.block_shape), dtype=pool.dtype, device=self._device)
        self._blocks = torch.empty(
            (num_blocks, *pool.block_shape), dtype=pool.dtype, pin_memory=self._device.type == "cuda"
        )

    def offload(self, moves: Items[Offload]) -> float:
        started = time.perf_counter()
        for group in self._groups(moves):
            staging = self._staging[: len(group)]
            self._pool.gather([move.source for move in group], staging)
            for block, move in zip(staging, group, strict=True):
                self._blocks[move.target].copy_(block, non_blocking=True)
        return self._finished(started)

    def onload(self, moves: Items[Onload]) -> float:
        started = time.perf_counter()
        for group in self._groups(moves):
            staging = self._staging[: len(group)]
            for block, move in zip(staging, group, strict=True):
                block.copy_(self._blocks[move.source], non_blocking=True)
            self._pool.scatter([move.target for move in group], staging)
        return self._finished(started)

    def _groups(self, moves: Items[_T]) -> Iterator[Items[_T]]:
        size = len(self._staging)
        return (moves[start : start + size] for start in range(0, len(moves), size))

    def _finished(self, started: float) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - started
