from __future__ import annotations

import pytest
import torch

from replica.kv_pool import KVPool, KVShape

SHAPE, BLOCK = KVShape(layers=2, kv_heads=2, head_dim=8), 4


def make_pool(*, heads_first: bool) -> KVPool:
    return KVPool(SHAPE, 16, BLOCK, torch.float32, torch.device("cpu"), heads_first=heads_first)


def random_blocks(count: int) -> torch.Tensor:
    return torch.randn(count, 2, 2, 2, BLOCK, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("heads_first", [True, False])
def test_a_run_of_blocks_is_read_without_copying(heads_first: bool) -> None:
    pool = make_pool(heads_first=heads_first)
    keys, values = pool.read(0, range(2, 5))
    again, _ = pool.read(0, range(4, 6))
    key = torch.ones(1, 2, 1, 8)

    pool.write(0, torch.tensor([4 * BLOCK]), key, key)

    assert keys[:, 2 * BLOCK].eq(1).all()
    assert values[:, 2 * BLOCK].eq(1).all()
    assert again[:, 0].eq(1).all()


def test_both_orders_in_memory_hold_the_same() -> None:
    key = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(2))
    contents = []
    for heads_first in (True, False):
        pool = make_pool(heads_first=heads_first)
        pool.scatter([3, 9, 0], random_blocks(3))
        pool.write(1, torch.tensor([12, 13, 39, 0, 60]), key, key + 1)
        pool.copy_blocks([9, 3], [5, 6])
        out = torch.empty(16, 2, 2, 2, BLOCK, 8)
        pool.gather(list(range(16)), out)
        contents.append(out)
        scattered, _ = pool.read(1, pool.blocks_of([9, 0, 3]))
        assert torch.equal(scattered.view(2, 3, BLOCK, 8).transpose(0, 1), out[[9, 0, 3], 1, 0])
        assert pool.pages(1)[0][13, 2].shape == (2, 8)
        assert torch.equal(pool.pages(1)[1][9, 3], out[9, 1, 1, :, 3])

    assert torch.equal(*contents)
    assert torch.equal(contents[0][[5, 6]], contents[0][[9, 3]])


def test_what_a_paged_kernel_reads_is_one_piece_where_tokens_come_first() -> None:
    keys, values = make_pool(heads_first=False).pages(0)

    assert keys.is_contiguous()
    assert values.is_contiguous()


def test_only_blocks_one_after_another_are_a_run() -> None:
    pool = make_pool(heads_first=True)

    assert pool.blocks_of([4, 5, 6]) == range(4, 7)
    assert isinstance(pool.blocks_of([6, 5, 4]), torch.Tensor)
