from __future__ import annotations

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from replica.paged_attention import PAGED, KVPool, KVShape, ShortDecodes, Span, Step, UnsupportedAttentionError

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 8, 4


class Layer(torch.nn.Module):
    layer_idx = 1
    is_causal = True


def make_pool() -> KVPool:
    return KVPool(KVShape(2, KV_HEADS, HEAD_DIM), 16, BLOCK, torch.float32, torch.device("cpu"))


def attend(step: Step, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **others: object) -> torch.Tensor:
    output, _ = ALL_ATTENTION_FUNCTIONS[PAGED](Layer(), query, key, value, None, scaling=0.3, step=step, **others)
    assert isinstance(output, torch.Tensor)
    return output


def plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Written out, no kernel: [1, tokens, heads, head dim] for the last queries of a causal sequence."""
    key, value = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * 0.3
    queries, context = scores.shape[2:]
    hidden = torch.ones(queries, context).triu(context - queries + 1).bool()
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value).transpose(1, 2)


def random_qkv(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    query, key, value = (
        torch.randn(1, heads, tokens, HEAD_DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return query, key, value


def slots_of(blocks: list[int], start: int, end: int) -> torch.Tensor:
    return torch.tensor([blocks[index // BLOCK] * BLOCK + index % BLOCK for index in range(start, end)])


def causal(queries: int, context: int) -> torch.Tensor | None:
    return torch.ones(queries, context).tril(context - queries).bool() if 1 < queries < context else None


@pytest.mark.parametrize("blocks", [[3, 4, 5, 6], [9, 2, 15, 0]], ids=["a run of blocks", "scattered blocks"])
@pytest.mark.parametrize("cuts", [[13], [5, 13], [4, 8, 13], [12, 13], list(range(1, 14))], ids=str)
def test_chunks_of_a_sequence_attend_as_the_whole_does(blocks: list[int], cuts: list[int]) -> None:
    pool = make_pool()
    query, key, value = random_qkv(13)
    outputs = []
    for start, end in zip([0, *cuts], cuts, strict=False):
        used = blocks[: -(-end // BLOCK)]
        run = range(used[0], used[-1] + 1)
        span = Span(0, end - start, end, run if list(run) == used else torch.tensor(used), causal(end - start, end))
        step = Step(pool, slots_of(blocks, start, end), None, [span])
        outputs.append(attend(step, *(tensor[:, :, start:end] for tensor in (query, key, value))))

    torch.testing.assert_close(torch.cat(outputs, 1), plain_attention(query, key, value))


def test_short_decodes_of_different_lengths_attend_as_each_alone() -> None:
    pool = make_pool()
    tables = {3: [7], 9: [1, 12, 5], 12: [1, 12, 6]}  # two of them share blocks 1 and 12
    query, key, value = random_qkv(12)
    for context, blocks in tables.items():
        pool.write(1, slots_of(blocks, 0, context), key[:, :, :context], value[:, :, :context])
    last = torch.tensor([context - 1 for context in tables])
    mask = torch.arange(12) < torch.tensor(list(tables))[:, None]
    padded = torch.tensor([7, 7, 7, 1, 12, 5, 1, 12, 6])
    slots = torch.cat([slots_of(blocks, context - 1, context) for context, blocks in tables.items()])
    step = Step(pool, slots, ShortDecodes(padded, mask[:, None, None]), [])

    output = attend(step, query[:, :, last], key[:, :, last], value[:, :, last])

    alone = [plain_attention(query[:, :, c - 1 : c], key[:, :, :c], value[:, :, :c]) for c in tables]
    torch.testing.assert_close(output, torch.cat(alone, 1))


def test_a_run_of_blocks_is_read_without_copying() -> None:
    pool = make_pool()
    keys, values = pool.read(0, range(2, 5))
    again, _ = pool.read(0, range(4, 6))
    key = torch.ones(1, KV_HEADS, 1, HEAD_DIM)

    pool.write(0, torch.tensor([4 * BLOCK]), key, key)

    assert keys[:, 2 * BLOCK].eq(1).all()
    assert values[:, 2 * BLOCK].eq(1).all()
    assert again[:, 0].eq(1).all()


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
    query, key, value = random_qkv(2)
    step = Step(make_pool(), torch.tensor([0, 1]), None, [Span(0, 2, 2, range(1), None)])

    with pytest.raises(UnsupportedAttentionError, match=reason):
        attend(step, query, key, value, **option)
