"""The publisher against a real Redis that is flushed, overwritten, frozen, killed and brought back empty."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis

from replica.prefix_cache import CacheEvents
from replica.publisher import Publisher
from shared.blocks import BlockKey, PublishedKey, checksum, published_key
from shared.fleet_state import Delta, FleetState, LogPosition, ReplicaRecord
from tests.helpers import eventually
from tests.restartable_redis import restartable_redis

BLOCKS = "warmroute:{default}:blocks:r1"
LOG = "warmroute:{default}:log:r1"


def record(**changes: object) -> ReplicaRecord:
    fields: dict[str, object] = {
        "id": "r1",
        "url": "http://127.0.0.1:9",
        "model": "tiny",
        "fingerprint": "f",
        "golden_key": "g",
        "golden_prompt_key": "p",
        "tokenizer": "digest",
        "block_size": 16,
        "context_tokens": 4096,
        "capacity_blocks": 1000,
    }
    return ReplicaRecord(**(fields | changes))  # type: ignore[arg-type]


def block(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


def blocks(*numbers: int) -> list[BlockKey]:
    return [block(number) for number in numbers]


def stored_in(client: Any) -> set[int]:
    return {int.from_bytes(member, "little") for member in client.smembers(BLOCKS)}


@asynccontextmanager
async def publishing(url: str, **options: float) -> AsyncIterator[Publisher]:
    state = FleetState(url, **options)  # type: ignore[arg-type]
    publisher = Publisher(state, record, b"bundle")
    publisher.start()
    try:
        yield publisher
    finally:
        await publisher.stop()
        await state.close()


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


async def test_what_the_engine_stores_and_removes_stands_in_redis_soon(redis_url: str, client: Any) -> None:
    async with publishing(redis_url) as publisher:
        publisher.offer(CacheEvents(blocks(1, 2, 3), []))
        await eventually(lambda: stored_in(client) == {1, 2, 3})
        publisher.offer(CacheEvents(blocks(4), blocks(3)))
        await eventually(lambda: stored_in(client) == {1, 2, 4})


async def test_the_record_carries_the_position_and_its_lease_runs_out_by_itself(redis_url: str, client: Any) -> None:
    async with publishing(redis_url) as publisher:
        await eventually(lambda: publisher.current)
        publisher.offer(CacheEvents(blocks(1), []))
        await eventually(lambda: publisher.position.version == 1)
        publisher.announce_soon()
        state = FleetState(redis_url)
        await eventually(lambda: b'"version":1' in (client.get("warmroute:{default}:replica:r1") or b""))
        assert (await state.records(["r1"]))["r1"].epoch == publisher.position.epoch
        await state.close()
        assert 0 < client.pttl("warmroute:{default}:replica:r1") <= 5000


async def test_a_block_that_comes_and_goes_within_one_batch_is_not_published(redis_url: str, client: Any) -> None:
    async with publishing(redis_url) as publisher:
        await eventually(lambda: publisher.current)
        publisher.offer(CacheEvents(blocks(1, 2), []))
        publisher.offer(CacheEvents(blocks(3), blocks(2)))
        await eventually(lambda: stored_in(client) == {1, 3})
        keys = [value for _, entry in client.xrange(LOG) for value in entry.values()]
        assert (2).to_bytes(8, "little") not in b"".join(value for value in keys if len(value) % 8 == 0)


async def test_blocks_whose_published_keys_collide_are_counted(redis_url: str, client: Any) -> None:
    twin = BlockKey(block(7)[:8] + b"another!")
    async with publishing(redis_url) as publisher:
        publisher.offer(CacheEvents([block(7), twin], []))
        await eventually(lambda: stored_in(client) == {7})
        publisher.offer(CacheEvents(blocks(8), [block(7)]))
        await eventually(lambda: stored_in(client) == {7, 8})
        publisher.offer(CacheEvents([], [twin]))
        await eventually(lambda: stored_in(client) == {8})


async def test_the_steps_of_one_flush_are_never_split(redis_url: str, client: Any) -> None:
    """Each step stores a chain of its own; whatever log entry is looked at, chains are in it whole."""
    async with publishing(redis_url) as publisher:
        for chain in range(200):
            publisher.offer(CacheEvents(blocks(*range(chain * 10 + 1, chain * 10 + 11)), []))
            if chain % 7 == 0:
                await asyncio.sleep(0)
        await eventually(lambda: len(stored_in(client)) == 2000)
        for _, entry in client.xrange(LOG):
            assert len(entry.get(b"stored", b"")) % 80 == 0


async def test_events_from_another_thread_arrive_whole(redis_url: str, client: Any) -> None:
    async with publishing(redis_url) as publisher:
        offers = [threading.Thread(target=publisher.offer, args=(CacheEvents(blocks(n), []),)) for n in range(1, 50)]
        for thread in offers:
            thread.start()
        await eventually(lambda: stored_in(client) == set(range(1, 50)))
        for thread in offers:
            thread.join()


async def test_both_tiers_are_published_with_counts_and_checksums(redis_url: str, client: Any) -> None:
    async with publishing(redis_url) as publisher:
        publisher.offer(CacheEvents(blocks(1, 2), []))
        await eventually(lambda: stored_in(client) == {1, 2})
        publisher.offer(CacheEvents([], blocks(2), host_stored=blocks(2)))
        await eventually(lambda: client.scard("warmroute:{default}:host:r1") == 1)
        (_, newest), *_ = client.xrevrange(LOG, count=1)
        assert newest[b"removed"] == newest[b"host_stored"] == block(2)[:8]
        assert (newest[b"count"], newest[b"host_count"]) == (b"1", b"1")
        assert int(newest[b"checksum"]) == checksum([published_key(block(1))])
        assert int(newest[b"host_checksum"]) == checksum([published_key(block(2))])


async def test_a_flushed_redis_is_filled_again_as_a_new_epoch(redis_url: str, client: Any) -> None:
    async with publishing(redis_url) as publisher:
        publisher.offer(CacheEvents(blocks(*range(10_000)), []))
        await eventually(lambda: len(stored_in(client)) == 10_000)
        epoch = publisher.position.epoch
        client.flushall()
        await eventually(lambda: len(stored_in(client)) == 10_000)
        assert publisher.position.epoch > epoch
        assert client.get("warmroute:{default}:tokenizer:digest") == b"bundle"


async def test_a_renewal_amid_unwritten_changes_takes_nothing_for_lost(redis_url: str, client: Any) -> None:
    async with publishing(redis_url) as publisher:
        await eventually(lambda: publisher.current)
        for number in range(50):
            publisher.offer(CacheEvents(blocks(number), []))
            publisher.announce_soon()
            await eventually(lambda: not publisher._queue and publisher._renew_at > 0)
        await eventually(lambda: stored_in(client) == set(range(50)))
        assert publisher.republished == 1


async def test_a_lost_tokenizer_alone_is_written_again(redis_url: str, client: Any) -> None:
    async with publishing(redis_url) as publisher:
        await eventually(lambda: publisher.current)
        client.delete("warmroute:{default}:tokenizer:digest")
        await eventually(lambda: client.get("warmroute:{default}:tokenizer:digest") == b"bundle")
        assert publisher.republished == 1


@pytest.mark.parametrize("vandalism", ["set replaced", "log deleted", "block removed", "log ahead", "a string"])
async def test_whatever_differs_from_what_was_published_is_put_right(
    redis_url: str, client: Any, vandalism: str
) -> None:
    async with publishing(redis_url) as publisher:
        publisher.offer(CacheEvents(blocks(1, 2, 3), []))
        await eventually(lambda: stored_in(client) == {1, 2, 3})
        epoch = publisher.position.epoch
        if vandalism == "set replaced":
            client.delete(BLOCKS)
            client.sadd(BLOCKS, b"somebody", b"else's  ")
        elif vandalism == "log deleted":
            client.delete(LOG)
        elif vandalism == "block removed":
            client.srem(BLOCKS, block(2)[:8])
        elif vandalism == "log ahead":
            client.xadd(LOG, {"count": 0}, id=f"{epoch + 1_000_000}-5")
        else:
            client.delete(BLOCKS)
            client.set(BLOCKS, "not a set")
        await eventually(lambda: publisher.republished == 2 and publisher.current)
        assert stored_in(client) == {1, 2, 3}
        assert publisher.position.epoch > epoch
        publisher.offer(CacheEvents(blocks(4), []))
        await eventually(lambda: stored_in(client) == {1, 2, 3, 4})


@pytest.mark.parametrize("kind", ["blocks", "host", "log"])
async def test_a_key_replaced_by_a_list_is_published_again_and_said_once_without_calling_redis_away(
    redis_url: str, client: Any, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    async with publishing(redis_url) as publisher:
        publisher.offer(CacheEvents(blocks(1, 2), [], blocks(3), []))
        await eventually(lambda: stored_in(client) == {1, 2})
        epoch = publisher.position.epoch
        key = f"warmroute:{{default}}:{kind}:r1"
        with client.pipeline() as pipe:
            pipe.delete(key)
            pipe.rpush(key, "not ours")
            pipe.execute()
        await eventually(lambda: publisher.republished == 2 and publisher.current)
        assert stored_in(client) == {1, 2}
        assert client.scard("warmroute:{default}:host:r1") == 1
        assert client.xlen(LOG) == 1
        assert publisher.position.epoch > epoch
    (warning,) = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert "lost or changed" in warning
    assert "WRONGTYPE" in warning


async def test_a_redis_that_refuses_is_quoted(caplog: pytest.LogCaptureFixture) -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"-DENIED Redis is running in protected mode\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server, publishing(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"):
        await eventually(lambda: "Redis is away" in caplog.text)
        assert "DENIED Redis is running in protected mode" in caplog.text


async def test_a_new_process_under_an_old_name_takes_over_what_the_dead_one_left(redis_url: str, client: Any) -> None:
    state = FleetState(redis_url)
    ahead = Delta(10**15, 3, stored=[PublishedKey(99)], count=1)  # by a clock that is ahead of ours
    await state.republish("r1", ahead)
    await state.close()
    async with publishing(redis_url) as publisher:
        publisher.offer(CacheEvents(blocks(1), []))
        await eventually(lambda: stored_in(client) == {1})
        assert publisher.position.epoch > ahead.epoch


async def test_two_replicas_with_one_id_say_so_and_do_not_flood_redis_or_the_log(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with publishing(redis_url) as one, publishing(redis_url) as two:
        one.offer(CacheEvents(blocks(1), []))
        two.offer(CacheEvents(blocks(2, 3), []))
        await eventually(lambda: one.republished + two.republished >= 6)
        assert max(one._retry_seconds, two._retry_seconds) > 0.3, "they try ever less often"
        warnings = [text for text in caplog.messages if "another replica has the same id" in text]
        assert 1 <= len(warnings) <= 2, "one line each"


async def test_stopping_leaves_nothing_but_a_goodbye_and_the_tokenizer(redis_url: str, client: Any) -> None:
    async with publishing(redis_url) as publisher:
        publisher.offer(CacheEvents(blocks(1), []))
        await eventually(lambda: stored_in(client) == {1})
    assert set(client.keys()) == {b"warmroute:{default}:tokenizer:digest", b"warmroute:{default}:replica:r1"}
    assert b'"state":"gone"' in client.get("warmroute:{default}:replica:r1")
    assert 0 < client.pttl("warmroute:{default}:replica:r1") <= 5000


async def test_a_replica_without_redis_serves_on_and_joins_when_it_comes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "replica.publisher")
    with restartable_redis() as server:
        server.kill()
        async with publishing(server.url) as publisher:
            publisher.offer(CacheEvents(blocks(1, 2), []))
            await eventually(lambda: caplog.messages)
            publisher.offer(CacheEvents(blocks(3), blocks(1)))
            await eventually(lambda: publisher._retry_seconds == 1.0, what="several attempts")
            assert len(caplog.messages) == 1, "one line per change of state, not per attempt"
            assert not publisher._queue, "events do not pile up"
            server.restart()
            await eventually(lambda: len(caplog.messages) == 2)
            assert stored_in(server.client) == {2, 3}
        assert [message.split(" (")[0] for message in caplog.messages] == [
            "Redis is away",
            f"published 2 blocks to Redis as epoch {publisher.position.epoch}",
        ]


async def test_a_redis_killed_and_back_empty_is_filled_again() -> None:
    with restartable_redis() as server:
        async with publishing(server.url) as publisher:
            publisher.offer(CacheEvents(blocks(*range(1, 100)), []))
            await eventually(lambda: len(stored_in(server.client)) == 99)
            server.kill()
            publisher.offer(CacheEvents(blocks(100), blocks(1)))
            await eventually(lambda: not publisher.current)
            server.restart()
            await eventually(lambda: stored_in(server.client) == set(range(2, 101)))


async def test_a_redis_that_hangs_holds_nobody_up() -> None:
    with restartable_redis() as server:
        async with publishing(server.url, timeout_seconds=0.2) as publisher:
            await eventually(lambda: publisher.current)
            server.freeze()
            publisher.offer(CacheEvents(blocks(1), []))
            await eventually(lambda: not publisher.current, timeout_seconds=2)
            server.thaw()
            await eventually(lambda: stored_in(server.client) == {1})
            server.freeze()
            await asyncio.wait_for(publisher.stop(), 2)
            server.thaw()


async def test_after_any_history_redis_holds_exactly_what_the_engine_holds(redis_url: str, client: Any) -> None:
    rng = random.Random(5)
    held: set[int] = set()
    async with publishing(redis_url) as publisher:
        for step in range(400):
            new = {rng.randrange(500) for _ in range(rng.randrange(20))} - held
            gone = set(rng.sample(sorted(held), min(len(held), rng.randrange(15))))
            held = (held | new) - gone
            publisher.offer(CacheEvents(blocks(*new), blocks(*gone)))
            if step % 20 == 0:
                await asyncio.sleep(0.005)
            if step == 200:
                client.flushall()
        await eventually(lambda: stored_in(client) == held)
        newest = client.xrevrange(LOG, count=1)[0][1]
        assert int(newest[b"count"]) == len(held)
        assert int(newest[b"checksum"]) == checksum(PublishedKey(key) for key in held)
        assert publisher.position > LogPosition(0, 0)


async def test_a_fault_of_ours_is_told_and_does_not_end_the_publishing(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with publishing(redis_url) as publisher:
        await eventually(lambda: publisher.current)

        async def broken(*_: object) -> None:
            monkeypatch.undo()
            raise RuntimeError("nobody has thought of this")

        monkeypatch.setattr(publisher._fleet_state, "publish", broken)
        publisher.offer(CacheEvents(blocks(1, 2), []))
        await eventually(lambda: "nobody has thought of this" in caplog.text)
        await eventually(lambda: publisher.current and publisher.republished == 2)
        with redis.Redis.from_url(redis_url) as client:
            assert stored_in(client) == {1, 2}
