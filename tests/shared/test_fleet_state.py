"""Every key and message in Redis, read back by a plain client as the design's table says."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from shared.blocks import PublishedKey, checksum, pack_keys
from shared.fleet_records import DeltaError, RecordError, decode_delta, decode_record, encode_delta, encode_record
from shared.fleet_state import (
    LOG_READ_ENTRIES,
    CostCoefficients,
    Delta,
    FleetState,
    FleetStateUnavailable,
    LogPosition,
    ReplicaLoad,
    ReplicaRecord,
)
from shared.work_events import Dispatched, Ended, FirstToken, WorkBatch, WorkEvent, decode_work, encode_work
from tests.restartable_redis import restartable_redis

P = "warmroute:{default}:"
RECORD = ReplicaRecord(
    id="r1",
    url="http://127.0.0.1:8001",
    model="tiny",
    fingerprint="f",
    golden_key="g",
    golden_prompt_key="p",
    tokenizer="t",
    block_size=16,
    context_tokens=2048,
    capacity_blocks=100,
    load=ReplicaLoad(running=2, waiting=1, queued_prefill_tokens=300, free_blocks=10, evictable_blocks=20),
    cost=CostCoefficients(0.01, 0.001, 1e-7),
)

_keys = st.lists(st.integers(0, 2**64 - 1).map(PublishedKey), max_size=20, unique=True)


def keys(*numbers: int) -> list[PublishedKey]:
    return [PublishedKey(number) for number in numbers]


def delta(epoch: int, version: int, **lists: Any) -> Delta:
    return Delta(epoch, version, **lists)


@pytest.fixture
async def state(redis_url: str) -> AsyncIterator[FleetState]:
    state = FleetState(redis_url)
    yield state
    await state.close()


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


async def test_an_announced_replica_is_listed_and_its_record_is_a_lease_in_json(state: FleetState, client: Any) -> None:
    await state.announce(RECORD)
    assert client.smembers(P + "replicas") == {b"r1"}
    assert 4000 < client.pttl(P + "replica:r1") <= 5000
    assert msgspec.json.decode(client.get(P + "replica:r1"))["load"]["queued_prefill_tokens"] == 300
    assert await state.replica_ids() == {"r1"}
    assert await state.records(["r1", "unknown"]) == {"r1": RECORD}


async def test_published_sets_hold_little_endian_keys_and_the_log_tells_of_the_change(
    state: FleetState, client: Any
) -> None:
    await state.republish("r1", delta(7, 0))
    first, last = 1, 2**64 - 1
    after = await state.publish(
        "r1", delta(7, 1, stored=keys(first, last), host_stored=keys(5), count=2, checksum=9, host_count=1)
    )
    assert client.smembers(P + "blocks:r1") == {struct.pack("<Q", first), struct.pack("<Q", last)}
    assert client.smembers(P + "host:r1") == {struct.pack("<Q", 5)}
    (entry_id, fields), *_ = client.xrevrange(P + "log:r1")
    assert entry_id == b"7-1"
    assert fields == {
        b"stored": struct.pack("<QQ", first, last),
        b"host_stored": struct.pack("<Q", 5),
        b"count": b"2",
        b"checksum": b"9",
        b"host_count": b"1",
        b"host_checksum": b"0",
    }
    assert after == (LogPosition(7, 1), 2, 1, True)
    await state.publish("r1", delta(7, 2, removed=keys(last), host_removed=keys(5), count=1))
    assert client.smembers(P + "blocks:r1") == {struct.pack("<Q", first)}
    assert not client.exists(P + "host:r1")


async def test_a_snapshot_is_everything_of_a_replica_at_one_instant(state: FleetState) -> None:
    assert await state.snapshot("r1") is None
    await state.announce(RECORD)
    assert await state.snapshot("r1") is None, "no log yet"
    many = keys(*range(1, 20_001))
    await state.republish("r1", delta(3, 0, stored=many, host_stored=keys(7), count=20_000, checksum=checksum(many)))
    snapshot = await state.snapshot("r1")
    assert snapshot is not None
    assert snapshot.record == RECORD
    assert sorted(snapshot.device_keys) == many
    assert snapshot.host_keys == [7]
    assert snapshot.last == delta(3, 0, count=20_000, checksum=checksum(many))


async def test_publishing_again_replaces_everything_and_starts_the_log_anew(state: FleetState, client: Any) -> None:
    await state.republish("r1", delta(3, 0, stored=keys(1, 2)))
    await state.publish("r1", delta(3, 1, stored=keys(3)))
    client.sadd(P + "blocks:r1", b"somebody")
    await state.republish("r1", delta(2, 0, stored=keys(9)))
    assert client.smembers(P + "blocks:r1") == {struct.pack("<Q", 9)}
    assert await state.last_log_position("r1") == LogPosition(2, 0)


async def test_what_a_vanished_replica_published_goes_away_in_the_end(state: FleetState, client: Any) -> None:
    await state.republish("r1", delta(3, 0, stored=keys(1), host_stored=keys(2)))
    await state.put_tokenizer("t", b"bundle")
    await state.announce(RECORD)
    for kind in ("blocks:r1", "host:r1", "log:r1", "tokenizer:t"):
        assert 0 < client.ttl(P + kind) <= 600, kind


async def test_a_position_already_in_the_log_is_refused_without_spelling_out_keys(state: FleetState) -> None:
    await state.republish("r1", delta(3, 5))
    with pytest.raises(FleetStateUnavailable, match="equal or smaller") as failure:
        await state.publish("r1", delta(3, 5, stored=keys(0x4142434445464748)))
    assert "HGFEDCBA" not in str(failure.value)


async def test_the_log_is_capped_and_read_in_order_in_pieces_of_bounded_size(state: FleetState, client: Any) -> None:
    await state.republish("r1", delta(3, 0))
    await state.republish("r2", delta(4, 0))
    for version in range(1, 1500):
        client.xadd(P + "log:r1", dict(encode_delta(delta(3, version))), id=f"3-{version}", maxlen=1024)
    await state.publish("r1", delta(3, 1500))
    await state.publish("r2", delta(4, 1))
    assert client.xlen(P + "log:r1") < 1200
    entries = await state.read_log({"r1": LogPosition(3, 1400), "r2": LogPosition(4, 0)}, 10)
    positions = [entry.position for entry in entries if entry.replica_id == "r1"]
    assert positions == [LogPosition(3, version) for version in range(1401, 1401 + LOG_READ_ENTRIES)]
    assert [entry.position for entry in entries if entry.replica_id == "r2"] == [LogPosition(4, 1)]
    assert await state.read_log({}, 10) == []
    assert await state.read_log({"r1": LogPosition(3, 1500)}, 10) == []


async def test_clusters_do_not_see_each_other(redis_url: str, state: FleetState) -> None:
    other = FleetState(redis_url, cluster="other")
    await state.announce(RECORD)
    assert await other.replica_ids() == set()
    await other.close()


async def test_goodbye_takes_all_back_and_stays_readable_for_one_lease(state: FleetState, client: Any) -> None:
    await state.announce(RECORD)
    await state.republish("r1", delta(3, 0, stored=keys(1), host_stored=keys(2)))
    await state.withdraw(RECORD)
    assert client.keys() == [(P + "replica:r1").encode()]
    assert (await state.records(["r1"]))["r1"].state == "gone"


async def test_with_a_secret_unsigned_and_wrongly_signed_records_are_counted_and_said_once(
    redis_url: str, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    router, replica = FleetState(redis_url, secret="s"), FleetState(redis_url, secret="s")
    await replica.announce(RECORD)
    assert await router.records(["r1"]) == {"r1": RECORD}
    body, signature = client.get(P + "replica:r1").split(b"\n")
    for forged in (body, body + b"\n", body + b"\n" + b"0" * 64, body.replace(b"8001", b"6666") + b"\n" + signature):
        client.set(P + "replica:r1", forged)
        for _ in range(3):
            assert await router.records(["r1"]) == {}
    assert [message.split(": ")[1].split(";")[0] for message in caplog.messages] == [
        "it is not signed",
        "its signature is wrong",
    ]
    client.set(P + "replica:r2", body + b"\n" + signature)
    assert await router.records(["r2"]) == {}, "a signed record is good for its own name only"
    assert router.rejected_records == {"r1": 12, "r2": 1}
    await router.close()
    await replica.close()


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"id": "r1"}',
        msgspec.json.encode(RECORD).replace(b'"block_size":16', b'"block_size":0'),
    ],
)
def test_a_record_that_cannot_be_used_is_rejected_with_a_reason(value: bytes) -> None:
    with pytest.raises(RecordError, match="cannot be read"):
        decode_record("r1", value, "")


def test_fields_of_a_later_version_are_passed_over() -> None:
    value = msgspec.json.encode(msgspec.to_builtins(RECORD) | {"from_the_future": 1})
    assert decode_record("r1", value, "") == RECORD
    assert decode_record("r1", encode_record(RECORD, "secret of the replica alone"), "") == RECORD


@given(stored=_keys, removed=_keys, host_stored=_keys, count=st.integers(0, 2**32), digest=st.integers(0, 2**64 - 1))
def test_any_delta_comes_back_from_its_stream_entry(
    stored: list[PublishedKey], removed: list[PublishedKey], host_stored: list[PublishedKey], count: int, digest: int
) -> None:
    sent = delta(1, 2, stored=stored, removed=removed, host_stored=host_stored, count=count, host_checksum=digest)
    fields = {
        name.encode(): value if isinstance(value, bytes) else str(value).encode()
        for name, value in encode_delta(sent).items()
    }
    got = decode_delta(LogPosition(1, 2), fields)
    assert msgspec.to_builtins(got) == msgspec.to_builtins(
        msgspec.structs.replace(
            sent, **{name: list(getattr(sent, name)) for name in ("stored", "removed", "host_stored", "host_removed")}
        )
    )


@pytest.mark.parametrize("damage", [{b"count": b"x"}, {b"stored": b"1234567"}])
def test_a_damaged_entry_is_an_error_of_its_own(damage: dict[bytes, bytes]) -> None:
    whole = {b"count": b"1", b"checksum": b"1", b"host_count": b"0", b"host_checksum": b"0"}
    with pytest.raises(DeltaError):
        decode_delta(LogPosition(1, 1), whole | damage)
    with pytest.raises(DeltaError):
        decode_delta(LogPosition(1, 1), {})


async def test_a_tokenizer_comes_back_as_it_was_put(state: FleetState) -> None:
    assert await state.get_tokenizer("t") is None
    await state.put_tokenizer("t", b"\x00packed")
    assert await state.get_tokenizer("t") == b"\x00packed"


async def test_routers_tell_each_other_of_their_work_in_batches(state: FleetState, client: Any) -> None:
    events: list[WorkEvent] = [Dispatched(1, "r1", 0.5, 40, True, pack_keys([PublishedKey(7)])), FirstToken(1)]
    ours = WorkBatch("a", 1, True, events)
    start = (await state.exchange_work("b", None, None)).position
    assert (await state.exchange_work("a", ours, start)).batches == []
    client.xadd(P + "work", {"router": "c", "batch": b"not MessagePack"})
    client.xadd(P + "work", {"events": b"of another version"})
    client.xadd(P + "work", encode_work(WorkBatch("d", 1, True, []), "") | {"router": "e"})
    read = await state.exchange_work("b", WorkBatch("b", 1, False, [Ended(1)]), start)
    assert read.batches == [ours]
    assert (await state.exchange_work("b", None, read.position)).batches == [], "its own are not read"
    assert (await state.exchange_work("a", None, read.position)).batches == [WorkBatch("b", 1, False, [Ended(1)])]


def test_work_is_believed_only_under_the_clusters_seal() -> None:
    batch = WorkBatch("a", 1, False, [Ended(1)])

    def received(fields: dict[str, bytes | str], secret: str) -> WorkBatch | None:
        return decode_work({k.encode(): v.encode() if isinstance(v, str) else v for k, v in fields.items()}, secret)

    assert received(encode_work(batch, "s"), "s") == batch
    assert received(encode_work(batch, "other"), "s") is None
    assert received(encode_work(batch, ""), "s") is None
    assert received(encode_work(batch, ""), "") == batch


async def test_a_redis_that_is_not_there_or_hangs_raises_in_time() -> None:
    with restartable_redis() as server:
        state = FleetState(server.url, timeout_seconds=0.2)
        await state.announce(RECORD)
        server.freeze()
        with pytest.raises(FleetStateUnavailable):
            await state.records(["r1"])
        server.thaw()
        assert "r1" in await state.records(["r1"])
        server.kill()
        with pytest.raises(FleetStateUnavailable):
            await state.snapshot("r1")
        await state.close()


def test_a_url_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="scheme"):
        FleetState("http://localhost")
