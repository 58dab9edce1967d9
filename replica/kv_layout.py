"""What a block's KV bytes look like, and how they are written down outside the pool.

raw     [ layers, keys and values, kv heads, block size, head dim ]       as the runner reads and writes it
int8    the same with one byte a number, behind one scale for each key and value (see `kv_int8`)
"""

from __future__ import annotations

from typing import Annotated, Final, Protocol

import msgspec

from replica.sequence import Sequence

__all__ = ["ENCODINGS", "BlockAccess", "KVEncoding", "KVLayout", "UnsupportedEncoding", "encoding_of"]

ENCODINGS: Final = ("raw", "int8")

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of equal layouts, made with equal weights, can take each other's place."""

    dtype: str
    """torch's name; `simulated` where nothing was computed."""
    layers: _Count
    kv_heads: _Count
    head_dim: _Count
    block_size: _Count
    rope: str
    """How keys were turned by their positions, as JSON; empty where they were not."""
    block_bytes: _Count
    """Of a raw block."""


class BlockAccess(Protocol):
    """How KV leaves a runner and comes back, between steps. Like a chunk, it is named by a sequence and a range."""

    kv_layout: KVLayout

    def read_blocks(self, sequence: Sequence, first: int, last: int) -> memoryview:
        """A writable copy of blocks first to last - 1, raw. What was not computed in the last one is zeros."""
        ...

    def write_blocks(self, sequence: Sequence, first: int, raw: memoryview) -> None:
        """Whole blocks, from the sequence's block `first` on. `raw` is free again afterwards."""
        ...


class UnsupportedEncoding(Exception):  # noqa: N818 - says what this replica cannot do
    """This replica cannot write or read KV like that. The message says why."""


class KVEncoding(Protocol):
    """Whole blocks to what is kept of them, and back. Results are valid until the next call."""

    stored_block_bytes: int

    def encode(self, raw: memoryview) -> memoryview:
        """Raises UnsupportedEncoding for numbers that the encoding cannot hold."""
        ...

    def decode(self, stored: memoryview) -> memoryview: ...


class _Raw:
    def __init__(self, layout: KVLayout) -> None:
        self.stored_block_bytes = layout.block_bytes

    def encode(self, raw: memoryview) -> memoryview:
        return raw

    def decode(self, stored: memoryview) -> memoryview:
        return stored


def encoding_of(name: str, layout: KVLayout) -> KVEncoding:
    """`name` is one of ENCODINGS. Raises UnsupportedEncoding."""
    if name == "raw":
        return _Raw(layout)
    if layout.dtype == "simulated":
        raise UnsupportedEncoding("the simulated engine has no KV that could be written as int8: use raw")
    from replica.kv_int8 import Int8

    return Int8(layout)
