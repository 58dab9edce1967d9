from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from replica import attention_cascade, attention_varlen
from replica.attention_cascade import CascadeAttention, shared_runs
from replica.attention_gathered import GatheredAttention
from replica.attention_varlen import VarlenAttention, layout_of
from replica.kv_pool import KVPool, KVShape
from replica.paged_attention import PAGED, Attention, Step, UnsupportedAttentionError, attention_for
from replica.runner import Chunk
from tests.replica.plain_varlen import plain_varlen
from tests.replica.tiny_zoo import make_sequence

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 8, 4
KINDS = (GatheredAttention, CascadeAttention, VarlenAttention)


@pytest.fixture(autouse=True)
def _plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_varlen, "_kernel", plain_varlen)


class Layer(torch.nn.Module):
    layer_idx = 1
    is_causal = True


def make_pool(blocks: int = 16, block_size: int = BLOCK, dtype: torch.dtype = torch.float32) -> KVPool:
    return KVPool(KVShape(2, KV_HEADS, HEAD_DIM), blocks, block_size, dtype, torch.device("cpu"))


def make_chunk(blocks: list[int], start: int, end: int) -> Chunk:
    sequence = make_sequence([1] * end)
    sequence.block_ids = blocks
    return Chunk(sequence, start, end)


def slots_of(chunk: Chunk, size: int) -> list[int]:
    blocks = chunk.sequence.block_ids
    return [blocks[index // size] * size + index % size for index in range(chunk.start, chunk.end)]


def attend(
    kind: type[Attention],
    pool: KVPool,
    chunks: list[Chunk],
    qkv: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    **others: object,
) -> list[torch.Tensor]:
    """The outputs [tokens, heads, head dim] of the chunks, whose queries, keys and values are in `qkv`."""
    attention = kind(pool, chunks)
    order = [chunks.index(chunk) for chunk in attention.chunks]
    assert sorted(order) == list(range(len(chunks)))
    query, key, value = (torch.cat([qkv[index][part] for index in order], 2) for part in range(3))
    slots = torch.tensor([slot for chunk in attention.chunks for slot in slots_of(chunk, pool.block_size)])
    step = Step(pool, slots, attention)
    output, _ = ALL_ATTENTION_FUNCTIONS[PAGED](Layer(), query, key, value, None, scaling=0.3, step=step, **others)
    assert isinstance(output, torch.Tensor)
    pieces = torch.split(output[0], [chunk.end - chunk.start for chunk in attention.chunks])
    return [pieces[order.index(index)] for index in range(len(chunks))]


def plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Written out, no kernel: [tokens, heads, head dim] for the last queries of a causal sequence."""
    key, value = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * 0.3
    queries, context = scores.shape[2:]
    hidden = torch.ones(queries, context).triu(context - queries + 1).bool()
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value).transpose(1, 2)[0]


def random_qkv(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * tokens + seed)
    query, key, value = (
        torch.randn(1, heads, tokens, HEAD_DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return query, key, value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [[3, 4, 5, 6], [9, 2, 15, 0]], ids=["a run of blocks", "scattered blocks"])
@pytest.mark.parametrize("cuts", [[13], [5, 13], [4, 8, 13], [12, 13], list(range(1, 14))], ids=str)
def test_chunks_of_a_sequence_attend_as_the_whole_does(
    kind: type[Attention], blocks: list[int], cuts: list[int]
) -> None:
    pool = make_pool()
    whole = random_qkv(13)
    outputs = []
    for start, end in zip([0, *cuts], cuts, strict=False):
        query, key, value = (tensor[:, :, start:end] for tensor in whole)
        outputs += attend(kind, pool, [make_chunk(blocks, start, end)], [(query, key, value)])

    torch.testing.assert_close(torch.cat(outputs), plain_attention(*whole))


@pytest.mark.parametrize("kind", KINDS)
def test_decodes_of_different_lengths_and_a_chunk_attend_as_each_alone(kind: type[Attention]) -> None:
    pool = make_pool()
    tables = {3: [7], 9: [1, 12, 5], 12: [1, 12, 6]}  # two of them share blocks 1 and 12
    whole = random_qkv(12)
    chunks, qkv, expected = [], [], []
    for context, blocks in tables.items():
        query, key, value = (tensor[:, :, :context] for tensor in whole)
        start = 8 if context == 12 else context - 1
        slots = torch.tensor(slots_of(make_chunk(blocks, 0, start), BLOCK))
        pool.write(1, slots, key[:, :, :start], value[:, :, :start])
        chunks.append(make_chunk(blocks, start, context))
        qkv.append((query[:, :, start:], key[:, :, start:], value[:, :, start:]))
        expected.append(plain_attention(query[:, :, start:], key, value))

    for output, right in zip(attend(kind, pool, chunks, qkv), expected, strict=True):
        torch.testing.assert_close(output, right)


@pytest.mark.parametrize("kind", [CascadeAttention, VarlenAttention])
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 2e-6), (torch.bfloat16, 0.03), (torch.float16, 0.004)], ids=str
)
@pytest.mark.parametrize("seed", range(6))
def test_steps_over_shared_prefixes_equal_the_gathered_reference(
    kind: type[Attention], dtype: torch.dtype, most: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_cascade, "_WORTHWHILE_TOKENS", 16)
    monkeypatch.setattr(attention_cascade, "_SHORT_TOKENS", 24)
    rng, pool = Random(seed), make_pool(blocks=400, dtype=dtype)
    free = list(range(400))
    if seed % 2:
        rng.shuffle(free)
    chunks = []
    roots = [[free.pop() for _ in range(rng.randint(3, 12))] for _ in range(2)]
    branches = [root + [free.pop() for _ in range(rng.randint(0, 6))] for root in roots for _ in range(2)]
    for _ in range(14):
        blocks = rng.choice([*branches, *roots, []]) + [free.pop() for _ in range(rng.randint(1, 9))]
        own = max(1, len(blocks) * BLOCK - rng.randrange(BLOCK))
        queries = rng.choice([1, 1, 1, 2, 4])
        chunks.append(make_chunk(blocks, max(0, own - queries), own))
    chunks = [chunk for chunk in chunks if _writes_its_own_blocks(chunk, chunks)]
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, 1, KV_HEADS, 400 * BLOCK, HEAD_DIM, generator=generator).to(dtype)
    pool.write(1, torch.arange(400 * BLOCK), kv[0], kv[1])
    qkv = [tuple(part.to(dtype) for part in random_qkv(chunk.end - chunk.start, n)) for n, chunk in enumerate(chunks)]

    outputs = attend(kind, pool, chunks, qkv)  # type: ignore[arg-type]

    if kind is CascadeAttention:
        assert CascadeAttention(pool, chunks)._shared, "a step in which nothing is shared tests nothing"
    reference = attend(GatheredAttention, pool, chunks, qkv)  # type: ignore[arg-type]
    difference = max((a - b).abs().max().item() for a, b in zip(outputs, reference, strict=True))
    assert difference < most


def _writes_its_own_blocks(chunk: Chunk, chunks: list[Chunk]) -> bool:
    written = set(chunk.sequence.block_ids[chunk.start // BLOCK :])
    return all(chunk is other or not written & set(other.sequence.block_ids) for other in chunks)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=8), min_size=1, max_size=8), st.integers(1, 8))
def test_runs_are_shared_by_all_their_rows_and_follow_one_another(tables: list[list[int]], worthwhile: int) -> None:
    tables.sort()
    covered = [0] * len(tables)
    for rows, start, end in shared_runs(tables, worthwhile):
        assert (rows.stop - rows.start - 1) * (end - start) >= worthwhile
        assert len({tuple(table[:end]) for table in tables[rows]}) == 1, "equal up to here, and long enough"
        assert covered[rows] == [start] * (rows.stop - rows.start), "no gap and no overlap"
        covered[rows] = [end] * (rows.stop - rows.start)
    if worthwhile == 1:  # then all is found: each pair of neighbours shares what it has in common
        for left, right, done in zip(tables, tables[1:], covered, strict=False):
            common = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
            assert done >= (min(len(left), len(right)) if common is None else common)


def test_a_descending_run_of_shared_blocks_is_read_without_copying() -> None:
    pool = make_pool(blocks=400)
    shared = list(range(350, 50, -1))

    plan = CascadeAttention(pool, [make_chunk([*shared, last], 1201, 1202) for last in (3, 9)])

    assert [run.blocks for run in plan._shared] == [range(51, 351)]


def test_the_private_operator_is_used_only_in_the_form_that_was_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_for(make_pool()) is CascadeAttention

    monkeypatch.setattr(attention_cascade, "_SCHEMA", "aten::another_form()")
    monkeypatch.setattr(attention_cascade, "_HAS_OPERATOR", attention_cascade._has_operator())

    assert attention_for(make_pool()) is GatheredAttention


def test_pages_of_a_step_are_laid_out_as_the_kernel_reads_them() -> None:
    chunks = [make_chunk([5, 6, 7], 699, 700), make_chunk([9], 0, 31)]

    paged = layout_of(chunks, 256, torch.device("cpu"))

    assert paged.block_table is not None
    assert paged.block_table.tolist() == [[5, 6, 7], [9, 0, 0]]
    assert paged.gathered is None
    assert (paged.cu_seq_q.tolist(), paged.cu_seq_k.tolist()) == ([0, 1, 32], [0, 700, 731])
    assert (paged.seqused_k.tolist(), paged.most_queries, paged.longest_context) == ([700, 31], 31, 700)


def test_small_blocks_are_laid_out_side_by_side_with_their_free_slots() -> None:
    chunks = [make_chunk([5, 1], 5, 6), make_chunk([8, 2, 3], 4, 9)]

    gathered = layout_of(chunks, 4, torch.device("cpu"))

    assert gathered.block_table is None
    assert gathered.gathered is not None
    assert gathered.gathered.tolist() == [5, 1, 8, 2, 3]
    assert gathered.cu_seq_k.tolist() == [0, 8, 20]
    assert (gathered.seqused_k.tolist(), gathered.longest_context) == ([6, 9], 12)


def test_pages_of_256_tokens_attend_as_the_whole_does() -> None:
    pool = make_pool(blocks=6, block_size=256)
    whole = random_qkv(600)
    outputs = []
    for start, end in [(0, 300), (300, 599), (599, 600)]:
        query, key, value = (tensor[:, :, start:end] for tensor in whole)
        outputs += attend(VarlenAttention, pool, [make_chunk([4, 0, 2], start, end)], [(query, key, value)])

    torch.testing.assert_close(torch.cat(outputs), plain_attention(*whole))


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"sliding_window": 8}, "sliding"),
        ({"softcap": 30.0}, "soft-capped"),
        ({"s_aux": torch.zeros(4)}, "sinks"),
        ({"is_causal": False}, "causal"),
    ],
)
def test_what_a_layer_asks_for_in_vain_is_refused_and_not_ignored(option: dict[str, object], reason: str) -> None:
    with pytest.raises(UnsupportedAttentionError, match=reason):
        attend(GatheredAttention, make_pool(), [make_chunk([0], 0, 2)], [random_qkv(2)], **option)
