from __future__ import annotations

from collections.abc import Callable

import pytest

from replica.block_pool import BlockPool, IntegrityError


def test_free_blocks_are_given_away_before_cached_ones_and_cached_ones_oldest_first() -> None:
    pool = BlockPool(4)
    blocks = [pool.take() for _ in range(4)]
    for block, keep in zip(blocks, (True, True, False, True), strict=True):
        pool.release(block, keep=keep)
    assert [pool.take() for _ in range(4)] == [blocks[2], blocks[0], blocks[1], blocks[3]]


def test_a_shared_block_leaves_the_middle_of_the_queue_and_returns_to_its_back() -> None:
    pool = BlockPool(3)
    for block in [pool.take() for _ in range(3)]:
        pool.release(block, keep=True)
    pool.share(1)
    assert pool.queue() == [0, 2]
    assert (pool.used_blocks, pool.cached_blocks, pool.free_blocks) == (1, 2, 0)
    pool.release(1, keep=True)
    assert pool.queue() == [0, 2, 1]
    pool.check_integrity()


def test_a_block_queues_only_when_its_last_reference_is_released() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.share(block)
    pool.release(block, keep=True)
    assert pool.idle_blocks == 0
    pool.release(block, keep=True)
    assert pool.idle_blocks == pool.cached_blocks == 1


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def _lose_a_link(pool: BlockPool) -> None:
    pool._behind[0] = 2


def _count_wrongly(pool: BlockPool) -> None:
    pool.idle_blocks -= 1


def _use_a_queued_block(pool: BlockPool) -> None:
    pool.references[1] += 1


def _keep_a_free_block(pool: BlockPool) -> None:
    pool._kept[0] = 1


@pytest.mark.parametrize("damage", [_lose_a_link, _count_wrongly, _use_a_queued_block, _keep_a_free_block])
def test_the_integrity_check_sees(damage: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(4)
    pool.check_integrity()
    damage(pool)
    with pytest.raises(IntegrityError):
        pool.check_integrity()
