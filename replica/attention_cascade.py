"""Paged attention on a CPU: sequences that share a prefix attend to it once.

    block tables of the decodes, sorted      5 6 7 8 | 20          rows 0-2 over 5 6 7 8: one call for all of them,
                                             5 6 7 8 | 10 11       since queries of different sequences differ from
                                             5 6 7 8 | 14          queries of one sequence only in their tails
                                             30 31                 the tails: one padded call, a long one alone

Attention over parts of a context gives the attention over the whole, if each part also tells the logarithm of its sum
of exponentials: the results are averaged with these as weights (as FlashAttention's kernels do inside). The query heads
of a group, and the rows that share, all stand as queries of one kv head, whose keys are thus read once.

A chunk of a prompt attends to what was there before without a mask, and to itself causally: no mask is ever built for
it. Contexts are views of the pool where their blocks lie one after another; else they are gathered. To attend to each
of several runs instead gains nothing over the copy (measured: a tenth faster at two runs, a tenth slower at eight).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from replica.kv_pool import KVPool
from replica.runner import Chunk

__all__ = ["CascadeAttention", "serves"]

_SHORT_TOKENS = 256
"""Up to here a tail is cheaper in one padded call with the others than in a call of its own (measured)."""
_WORTHWHILE_TOKENS = 1024
"""A call of its own for a shared run must spare the reading of as many tokens (measured)."""

_SCHEMA = (
    "aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
    "bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
)


def serves(pool: KVPool) -> bool:
    return _HAS_OPERATOR and pool.device.type == "cpu"


def _has_operator() -> bool:
    """It is private to torch: used only while it is what was tested."""
    packet = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    return packet is not None and str(packet.default._schema) == _SCHEMA


_HAS_OPERATOR = _has_operator()


@dataclass(frozen=True, slots=True)
class _Shared:
    """Full blocks that the decodes `rows` have in common. Their order means nothing: all of it is seen by all."""

    rows: slice
    blocks: torch.Tensor | range


@dataclass(frozen=True, slots=True)
class _Tails:
    """The rest of the context of some decodes, their own tokens included."""

    rows: torch.Tensor | slice
    sequences: int
    blocks: torch.Tensor | range
    """[sequences * blocks of the longest tail]; the padding names any block."""
    tokens: int
    """Of the longest tail."""
    mask: torch.Tensor | None
    """[sequences, 1, 1, tokens], 0 where a tail is, else minus infinity; None for a tail alone."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Queries `rows` of the packed row come after `past` tokens of their sequence, which are in `blocks`."""

    rows: slice
    past: int
    blocks: torch.Tensor | range


class CascadeAttention:
    """Fills `replica.paged_attention.Attention`. Decodes come first, those that share a prefix side by side."""

    def __init__(self, pool: KVPool, chunks: Items[Chunk]) -> None:
        self._pool = pool
        decodes = sorted((chunk for chunk in chunks if _is_decode(chunk)), key=self._sharable)
        prompts = [chunk for chunk in chunks if not _is_decode(chunk)]
        self.chunks = [*decodes, *prompts]
        self._decodes = len(decodes)
        self._shared: list[_Shared] = []
        tail_starts = self._find_shared(decodes)
        self._tails = self._find_tails(decodes, tail_starts)
        self._spans: list[_Span] = []
        first = len(decodes)
        for chunk in prompts:
            table = chunk.sequence.block_ids[: -(-chunk.start // pool.block_size)]
            last = first + chunk.end - chunk.start
            self._spans.append(_Span(slice(first, last), chunk.start, pool.blocks_of(table) if table else range(0)))
            first = last

    def _sharable(self, chunk: Chunk) -> list[int]:
        """All blocks but that of the decode's own token."""
        return chunk.sequence.block_ids[: (chunk.end - 1) // self._pool.block_size]

    def _find_shared(self, decodes: list[Chunk]) -> list[int]:
        """How many leading blocks of each decode are taken care of by shared runs."""
        tables = [self._sharable(chunk) for chunk in decodes]
        covered = [0] * len(decodes)
        for rows, start, end in shared_runs(tables, -(-_WORTHWHILE_TOKENS // self._pool.block_size)):
            table = sorted(tables[rows.start][start:end])
            self._shared.append(_Shared(rows, self._pool.blocks_of(table)))
            covered[rows] = [end] * (rows.stop - rows.start)
        return covered

    def _find_tails(self, decodes: list[Chunk], starts: list[int]) -> list[_Tails]:
        size = self._pool.block_size
        tables = [chunk.sequence.block_ids[s : -(-chunk.end // size)] for chunk, s in zip(decodes, starts, strict=True)]
        tokens = [chunk.end - start * size for chunk, start in zip(decodes, starts, strict=True)]
        short = [row for row, rest in enumerate(tokens) if rest <= _SHORT_TOKENS]
        alone = [row for row, rest in enumerate(tokens) if rest > _SHORT_TOKENS]
        if len(short) == 1:
            alone += short
        tails = [_Tails(slice(row, row + 1), 1, self._pool.blocks_of(tables[row]), tokens[row], None) for row in alone]
        if len(short) > 1:
            tails.append(self._padded(short, [tables[row] for row in short], [tokens[row] for row in short]))
        return tails

    def _padded(self, rows: list[int], tables: list[list[int]], tokens: list[int]) -> _Tails:
        longest = max(map(len, tables))
        padded = [block for table in tables for block in table + table[-1:] * (longest - len(table))]
        hidden = torch.arange(max(tokens)) >= torch.tensor(tokens)[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._pool.dtype).masked_fill_(hidden, float("-inf"))
        return _Tails(self._pool.index(rows), len(rows), self._pool.index(padded), max(tokens), mask[:, None, None])

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        attended = torch.empty_like(query)
        if self._decodes:
            self._attend_decodes(layer, query, attended, key.shape[1], scaling)
        for span in self._spans:
            self._attend_chunk(layer, query, key, value, scaling, span, attended)
        return attended

    def _attend_decodes(
        self, layer: int, query: torch.Tensor, attended: torch.Tensor, kv_heads: int, scaling: float | None
    ) -> None:
        heads, head_dim = query.shape[1], query.shape[3]
        group = heads // kv_heads
        # [decodes, kv heads, query heads of each, head dim]
        queries = query[0, :, : self._decodes].transpose(0, 1).reshape(self._decodes, kv_heads, group, head_dim)
        if len(self._tails) == 1:  # that of all decodes
            outputs, weights = self._attend_tails(layer, queries, self._tails[0], scaling)
        else:
            outputs = torch.empty_like(queries)
            weights = torch.empty(queries.shape[:3], dtype=torch.promote_types(queries.dtype, torch.float32))
            for tails in self._tails:
                outputs[tails.rows], weights[tails.rows] = self._attend_tails(
                    layer, queries[tails.rows], tails, scaling
                )
        for shared in self._shared:
            rows_queries = queries[shared.rows].transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
            keys, values = (kv[None] for kv in self._pool.read(layer, shared.blocks))
            output, weight = _flash(rows_queries, keys, values, scaling)
            output = output.view(kv_heads, -1, group, head_dim).transpose(0, 1)
            weight = weight.view(kv_heads, -1, group).transpose(0, 1)
            _merge(outputs[shared.rows], weights[shared.rows], output, weight)
        attended[0, :, : self._decodes] = outputs.view(self._decodes, heads, head_dim).transpose(0, 1)

    def _attend_tails(
        self, layer: int, queries: torch.Tensor, tails: _Tails, scaling: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (
            kv.view(kv.shape[0], tails.sequences, -1, kv.shape[2])[:, :, : tails.tokens].transpose(0, 1)
            for kv in self._pool.read(layer, tails.blocks)
        )
        return _flash(queries, keys, values, scaling, mask=tails.mask)

    def _attend_chunk(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        span: _Span,
        attended: torch.Tensor,
    ) -> None:
        rows, kv_heads = span.rows, key.shape[1]
        queries = query[:, :, rows]
        output, weight = _flash(queries, key[:, :, rows], value[:, :, rows], scaling, causal=True)
        if span.past:
            keys, values = (kv[None, :, : span.past] for kv in self._pool.read(layer, span.blocks))
            folded = queries.reshape(1, kv_heads, -1, queries.shape[-1])
            before, before_weight = _flash(folded, keys, values, scaling)
            _merge(output, weight, before.reshape(output.shape), before_weight.reshape(weight.shape))
        attended[:, :, rows] = output


def shared_runs(tables: list[list[int]], worthwhile_blocks: int) -> Iterator[tuple[slice, int, int]]:
    """`(rows, start, end)`: blocks start to end - 1 of these rows are the same, and so are all before them.

    `tables` are sorted, so those that begin alike stand side by side. A run is told only where reading it once spares
    the reading of so many blocks. Runs of a row come in order and without gaps.
    """
    pending = [(0, len(tables), 0, 0)]
    while pending:
        first, last, start, equal = pending.pop()
        # Rows that go on with the same block; those whose table ends here have nothing more to share.
        while first < last:
            stop = first + 1
            if len(tables[first]) > equal:
                block = tables[first][equal]
                while stop < last and tables[stop][equal] == block:
                    stop += 1
            if stop - first > 1:
                end = _common(tables[first], tables[stop - 1], equal)
                if (stop - first - 1) * (end - start) >= worthwhile_blocks:
                    yield slice(first, stop), start, end
                    pending.append((first, stop, end, end))
                else:
                    pending.append((first, stop, start, end))
            first = stop


def _common(left: list[int], right: list[int], equal: int) -> int:
    """How many leading blocks are the same, where the first `equal` are."""
    shortest = min(len(left), len(right))
    return next((index for index in range(equal, shortest) if left[index] != right[index]), shortest)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the logarithm of its sums of exponentials: [..., queries, head dim] and [..., queries]."""
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scaling
    )
    return output, logsumexp


def _merge(output: torch.Tensor, weight: torch.Tensor, other: torch.Tensor, other_weight: torch.Tensor) -> None:
    """Into `output` and `weight`, those of both parts together."""
    share = torch.sigmoid(other_weight - weight)[..., None].to(output.dtype)
    output.copy_(torch.lerp(output, other, share))
    torch.logaddexp(weight, other_weight, out=weight)


def _is_decode(chunk: Chunk) -> bool:
    return chunk.end - chunk.start == 1
