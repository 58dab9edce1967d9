"""The keys and values of all layers, in blocks.

a layer's keys, by name    [ kv heads, blocks, block size, head dim ]     values alike; a slot is block * size + offset
in memory, heads first       the same: one head's context is one piece, and a CPU reads it up to twice as fast
in memory, tokens first    [ blocks, block size, kv heads, head dim ]     the pages that a GPU's paged kernel asks for
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

__all__ = ["KVPool", "KVShape", "kv_shape"]


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


class KVPool:
    """Memory is touched only as slots are written."""

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        heads_first: bool = True,
    ) -> None:
        self.dtype, self.device = dtype, device
        self.block_size = block_size
        self.block_shape = (shape.layers, 2, shape.kv_heads, block_size, shape.head_dim)
        """Of a block in one piece, as `gather` gives and `scatter` takes it."""

        def make() -> torch.Tensor:
            if heads_first:
                size = (shape.kv_heads, num_blocks, block_size, shape.head_dim)
                return torch.zeros(size, dtype=dtype, device=device)
            size = (num_blocks, block_size, shape.kv_heads, shape.head_dim)
            return torch.zeros(size, dtype=dtype, device=device).permute(2, 0, 1, 3)

        self._keys = [make() for _ in range(shape.layers)]
        self._values = [make() for _ in range(shape.layers)]
        # Gathering into the same memory each time spares the page faults of fresh allocations, which cost more than
        # the copy itself.
        self._scratch = torch.empty(0, dtype=dtype, device=device)

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block_shape) * self.dtype.itemsize

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """All that the sources hold. No target is also a source."""
        read, written = self.index(sources), self.index(targets)
        for kv in (*self._keys, *self._values):
            kv.index_copy_(1, written, kv.index_select(1, read))

    def gather(self, blocks: list[int], out: torch.Tensor) -> None:
        """`out`: [blocks, *block_shape]."""
        index = self.index(blocks)
        for layer, pair in enumerate(zip(self._keys, self._values, strict=True)):
            for which, kv in enumerate(pair):
                out[:, layer, which] = kv.index_select(1, index).transpose(0, 1)

    def scatter(self, blocks: list[int], kv_blocks: torch.Tensor) -> None:
        """The inverse of `gather`."""
        index = self.index(blocks)
        for layer, pair in enumerate(zip(self._keys, self._values, strict=True)):
            for which, kv in enumerate(pair):
                kv.index_copy_(1, index, kv_blocks[:, layer, which].transpose(0, 1))

    def index(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.device)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """`key` and `value`: [1, kv heads, tokens, head dim]."""
        self._keys[layer].flatten(1, 2).index_copy_(1, slots, key[0])
        self._values[layer].flatten(1, 2).index_copy_(1, slots, value[0])

    def blocks_of(self, table: list[int]) -> torch.Tensor | range:
        """As `read` takes them: a range where they lie one after another, an index otherwise."""
        run = range(table[0], table[0] + len(table))
        return run if table == list(run) else self.index(table)

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

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values as [blocks, block size, kv heads, head dim] each, without a copy."""
        return self._keys[layer].permute(1, 2, 0, 3), self._values[layer].permute(1, 2, 0, 3)
