"""Redis: every key, and every call that router and replica make on it.

    warmroute:{<cluster>}:replicas            SET     replica ids
    warmroute:{<cluster>}:replica:<id>        STRING  the record, a lease of 5 s renewed every 1 s
    warmroute:{<cluster>}:blocks:<id>         SET     8-byte keys held on the device      } these three expire ten
    warmroute:{<cluster>}:host:<id>           SET     8-byte keys held in host memory     } minutes after the last
    warmroute:{<cluster>}:log:<id>            STREAM  deltas, ids <epoch>-<version>       } sign of life
    warmroute:{<cluster>}:tokenizer:<digest>  STRING  what a router renders and tokenizes with
    warmroute:{<cluster>}:work                STREAM  what routers tell each other, in batches

Sets and log change in one MULTI/EXEC, and a snapshot reads all of a replica in one script, so that a reader can take
the sets and follow the log from exactly there. The braces put a cluster's keys into one hash slot.

Every call either answers within `timeout_seconds` or raises FleetStateUnavailable; nothing is retried here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import msgspec
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from shared.blocks import PublishedKey, pack_keys, unpack_keys
from shared.fleet_calls import (
    FleetStateMistyped,
    FleetStateUnavailable,
    MistypedKeys,
    answered,
    execute,
    unavailable,
)
from shared.fleet_records import (
    CostCoefficients,
    Delta,
    DeltaError,
    LogEntry,
    LogPosition,
    Published,
    RecordError,
    ReplicaLoad,
    ReplicaRecord,
    Snapshot,
    decode_delta,
    decode_record,
    encode_delta,
    encode_record,
)
from shared.work_events import WorkBatch, WorkRead, decode_work, encode_work

__all__ = [
    "CostCoefficients",
    "Delta",
    "FleetState",
    "FleetStateMistyped",
    "FleetStateUnavailable",
    "LEASE_SECONDS",
    "LOG_READ_ENTRIES",
    "LogEntry",
    "LogPosition",
    "Published",
    "RENEW_SECONDS",
    "ReplicaLoad",
    "ReplicaRecord",
    "Snapshot",
]

LEASE_SECONDS = 5.0
RENEW_SECONDS = 1.0
_LEFTOVERS_SECONDS = 600
"""How long what a vanished replica published stays, should nobody clean up."""
_LOG_ENTRIES = 1024
_WORK_ENTRIES = 1024
LOG_READ_ENTRIES = 64
"""Of each log in one read, which bounds what an answer can hold."""
_WORK_READ_BATCHES = 256
_KEYS_PER_COMMAND = 4096
_CONNECTIONS = 6

# One answer of four strings instead of one of a hundred thousand: the client parses replies in Python.
_SNAPSHOT = """
local last = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)
return {redis.call('GET', KEYS[1]), table.concat(redis.call('SMEMBERS', KEYS[2])),
        table.concat(redis.call('SMEMBERS', KEYS[3])), last}
"""

_TYPES = {"replica": b"string", "blocks": b"set", "host": b"set", "log": b"stream"}
"""Of what one replica writes, in the script's order."""

_logger = logging.getLogger(__name__)


class FleetState:
    """One cluster's state. Used from one event loop; close it when done."""

    def __init__(self, redis_url: str, cluster: str = "default", secret: str = "", *, timeout_seconds: float = 2.0):
        """Does not connect yet. Raises ValueError on a URL that cannot be one of Redis."""
        pool = BlockingConnectionPool.from_url(
            redis_url,
            max_connections=_CONNECTIONS,
            timeout=timeout_seconds,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            # The client would introduce itself unasked, and swallow the words of a Redis that refuses the connection.
            driver_info=None,
        )
        self._redis = Redis.from_pool(pool)
        self._timeout_ms = int(timeout_seconds * 1000)
        self._prefix = f"warmroute:{{{cluster}}}:"
        self._secret = secret
        self._mistyped = MistypedKeys()
        self._rejected_now: dict[str, str] = {}
        self.rejected_records: Counter[str] = Counter()
        """Times that a record was ignored, by replica id."""

    async def close(self) -> None:
        await self._redis.aclose()

    # What a replica writes

    async def announce(self, record: ReplicaRecord) -> Published:
        """Renew the lease, and keep what the replica published from expiring."""
        async with self._transaction() as pipe:
            pipe.set(self._key("replica", record.id), encode_record(record, self._secret), px=int(LEASE_SECONDS * 1000))
            pipe.sadd(self._prefix + "replicas", record.id)
            pipe.expire(self._key("tokenizer", record.tokenizer), _LEFTOVERS_SECONDS)
            pipe.type(self._key("tokenizer", record.tokenizer))
            self._keep_and_report(pipe, record.id)
            report = await execute(pipe, may_be_mistyped=1)
        if isinstance(report[1], RedisError):
            self._mistyped.tell(self._prefix + "replicas")
        return _published(report, tokenizer_known=report[3] == b"string")

    async def publish(self, replica_id: str, delta: Delta) -> Published:
        """Change the sets and append to the log, both or neither. Fails if the log is already past this position."""
        device, host = self._key("blocks", replica_id), self._key("host", replica_id)
        async with self._transaction() as pipe:
            _add(pipe, device, delta.stored)
            _add(pipe, host, delta.host_stored)
            for keys in _packed_chunks(delta.removed):
                pipe.srem(device, *keys)
            for keys in _packed_chunks(delta.host_removed):
                pipe.srem(host, *keys)
            self._append(pipe, replica_id, delta)
            self._keep_and_report(pipe, replica_id)
            return _published(await execute(pipe))

    async def republish(self, replica_id: str, state: Delta) -> Published:
        """Replace all that stands in Redis for this replica by `state.stored` and `state.host_stored`: a new epoch.

        The log starts again with one entry that carries counts and checksums alone; followers see the epoch change
        and read the sets.
        """
        device, host, log = (self._key(kind, replica_id) for kind in ("blocks", "host", "log"))
        async with self._transaction() as pipe:
            pipe.delete(device, host, log)
            _add(pipe, device, state.stored)
            _add(pipe, host, state.host_stored)
            self._append(pipe, replica_id, without_keys(state))
            self._keep_and_report(pipe, replica_id)
            return _published(await execute(pipe))

    async def last_log_position(self, replica_id: str) -> LogPosition | None:
        """None too where something else than a log stands in its place."""
        with suppress(FleetStateMistyped), unavailable():
            return _last_position(await answered(self._redis.xrevrange(self._key("log", replica_id), count=1)))
        return None

    async def withdraw(self, record: ReplicaRecord) -> None:
        """Leave nothing behind but a goodbye, which runs out with the lease."""
        goodbye = encode_record(msgspec.structs.replace(record, state="gone"), self._secret)
        async with self._transaction() as pipe:
            pipe.srem(self._prefix + "replicas", record.id)
            pipe.delete(*(self._key(kind, record.id) for kind in ("blocks", "host", "log")))
            pipe.set(self._key("replica", record.id), goodbye, px=int(LEASE_SECONDS * 1000))
            await execute(pipe)

    # What a router reads

    async def replica_ids(self) -> set[str]:
        """Raises FleetStateMistyped where something else stands in the list's place."""
        with self._mistyped.told(self._prefix + "replicas"):
            members = await answered(self._redis.smembers(self._prefix + "replicas"))
        return {member.decode(errors="replace") for member in members}

    async def unlist(self, ids: Collection[str]) -> None:
        """Take names off the list that nobody has had for long; a replica that does live lists itself each second."""
        with unavailable():
            await answered(self._redis.srem(self._prefix + "replicas", *ids))

    async def records(self, ids: Iterable[str]) -> dict[str, ReplicaRecord]:
        """The records of those replicas whose lease runs; a record that must not be used is counted and left out."""
        if not (wanted := list(ids)):
            return {}
        with unavailable():
            values = await answered(self._redis.mget([self._key("replica", replica_id) for replica_id in wanted]))
        records = {}
        for replica_id, value in zip(wanted, values, strict=True):
            if value is None:
                self._rejected_now.pop(replica_id, None)
            elif record := self._accept(replica_id, value):
                records[replica_id] = record
        return records

    async def snapshot(self, replica_id: str) -> Snapshot | None:
        """All that the replica publishes, at one instant. None while record or log are missing or unusable.

        Raises FleetStateMistyped, which names it, where one of its keys holds something of another type.
        """
        keys = [self._key(kind, replica_id) for kind in _TYPES]
        try:
            with unavailable():
                value, device, host, newest = await answered(self._redis.eval(_SNAPSHOT, len(keys), *keys))
        except FleetStateMistyped as error:
            wrong = [key for kind in _TYPES for key in await self._mistyped_of(kind, [replica_id])]
            raise FleetStateMistyped(
                f"somebody else wrote to {', '.join(wrong) or 'one of its keys'}; DEL it"
            ) from error
        record = self._accept(replica_id, value) if value is not None else None
        if record is None or not newest:
            return None
        entry_id, flat = newest[0]
        position = _position(entry_id)
        try:
            last = decode_delta(position, dict(zip(flat[::2], flat[1::2], strict=True)))
            return Snapshot(record, unpack_keys(device), unpack_keys(host), without_keys(last))
        except (DeltaError, ValueError):
            return None

    async def read_log(self, after: Mapping[str, LogPosition], block_ms: int) -> list[LogEntry]:
        """New entries of all these replicas' logs, oldest first for each; waits up to `block_ms` for the first one.

        At most `LOG_READ_ENTRIES` per replica: ask again until a replica gives fewer. What is no log at all is told as
        one entry that cannot be read, and keeps the others waiting for this one call only.
        """
        if not after:
            return []
        streams = {self._key("log", replica_id): f"{at.epoch}-{at.version}" for replica_id, at in after.items()}
        try:
            with unavailable():
                answer = await self._xread(streams, LOG_READ_ENTRIES, block_ms)
        except FleetStateMistyped:
            return [LogEntry(wrong, after[wrong], None) for wrong in (await self._mistyped_of("log", after)).values()]
        skip = len(self._key("log", ""))
        entries = []
        for key, items in answer:
            replica_id = key.decode()[skip:]
            for entry_id, fields in items:
                position = _position(entry_id)
                try:
                    delta = decode_delta(position, fields)
                except DeltaError:
                    delta = None
                entries.append(LogEntry(replica_id, position, delta))
        return entries

    async def _mistyped_of(self, kind: str, ids: Iterable[str]) -> dict[str, str]:
        """Keys of that kind that are not of its type, with their replicas' ids."""
        keys = {self._key(kind, replica_id): replica_id for replica_id in ids}
        async with self._transaction() as pipe:
            for key in keys:
                pipe.type(key)
            types = await execute(pipe)
        fine = (_TYPES[kind], b"none")
        return {key: keys[key] for key, found in zip(keys, types, strict=True) if found not in fine}

    # Tokenizers

    async def put_tokenizer(self, digest: str, packed: bytes) -> None:
        with unavailable():
            await self._redis.set(self._key("tokenizer", digest), packed, ex=_LEFTOVERS_SECONDS)

    async def get_tokenizer(self, digest: str) -> bytes | None:
        """As it stands there: the caller checks that its content has this digest."""
        with self._mistyped.told(self._key("tokenizer", digest)):
            return cast("bytes | None", await self._redis.get(self._key("tokenizer", digest)))

    # Work under way

    async def exchange_work(self, router_id: str, batch: WorkBatch | None, after: str | None) -> WorkRead:
        """Tell others this router's `batch`, if there is one, and read theirs after that position, in one round trip.

        None asks for the present end of the stream, and for no batches. Does not wait for any to come.
        """
        stream = self._prefix + "work"
        with self._mistyped.told(stream):
            async with self._redis.pipeline(transaction=False) as pipe:
                if after is None:
                    pipe.xrevrange(stream, count=1)
                else:
                    pipe.xread({stream: after}, count=_WORK_READ_BATCHES)
                if batch is not None:
                    fields = cast("dict[Any, Any]", encode_work(batch, self._secret))
                    pipe.xadd(stream, fields, maxlen=_WORK_ENTRIES, approximate=True)
                answer = (await execute(pipe))[0]
        if after is None:
            return WorkRead(answer[0][0].decode() if answer else "0-0", [])
        batches = []
        for _, items in answer or ():
            for entry_id, entry in items:
                after = entry_id.decode()
                if entry.get(b"router") != router_id.encode() and (told := decode_work(entry, self._secret)):
                    batches.append(told)
        return WorkRead(after, batches)

    # Inside

    def _key(self, kind: str, name: str) -> str:
        return f"{self._prefix}{kind}:{name}"

    async def _xread(self, after: dict[str, str], count: int, block_ms: int) -> Sequence[Any]:
        # To Redis 0 means for ever; and a wait longer than the socket's patience would look like an outage.
        patience_ms = max(1, min(block_ms, self._timeout_ms // 2))
        return await answered(self._redis.xread(cast("dict[Any, Any]", after), count=count, block=patience_ms)) or ()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Pipeline]:
        with unavailable():
            async with self._redis.pipeline(transaction=True) as pipe:
                yield pipe

    def _append(self, pipe: Pipeline, replica_id: str, delta: Delta) -> None:
        pipe.xadd(
            self._key("log", replica_id),
            cast("dict[Any, Any]", encode_delta(delta)),
            id=f"{delta.epoch}-{delta.version}",
            maxlen=_LOG_ENTRIES,
            approximate=True,
        )

    def _keep_and_report(self, pipe: Pipeline, replica_id: str) -> None:
        device, host, log = (self._key(kind, replica_id) for kind in ("blocks", "host", "log"))
        for key in (device, host, log):
            pipe.expire(key, _LEFTOVERS_SECONDS)
        pipe.scard(device)
        pipe.scard(host)
        pipe.xrevrange(log, count=1)

    def _accept(self, replica_id: str, value: bytes) -> ReplicaRecord | None:
        try:
            record = decode_record(replica_id, value, self._secret)
        except RecordError as error:
            self.rejected_records[replica_id] += 1
            if self._rejected_now.get(replica_id) != str(error):
                self._rejected_now[replica_id] = str(error)
                _logger.warning("replica %r is ignored: %s", replica_id, error)
            return None
        self._rejected_now.pop(replica_id, None)
        return record


def without_keys(delta: Delta) -> Delta:
    """Position, counts and checksums alone."""
    return msgspec.structs.replace(delta, stored=(), removed=(), host_stored=(), host_removed=())


def _add(pipe: Pipeline, key: str, keys: Sequence[PublishedKey]) -> None:
    for chunk in _packed_chunks(keys):
        pipe.sadd(key, *chunk)


def _packed_chunks(keys: Sequence[PublishedKey]) -> Iterator[list[bytes]]:
    packed = pack_keys(keys)
    for start in range(0, len(packed), 8 * _KEYS_PER_COMMAND):
        chunk = packed[start : start + 8 * _KEYS_PER_COMMAND]
        yield [chunk[at : at + 8] for at in range(0, len(chunk), 8)]


def _published(report: Sequence[Any], tokenizer_known: bool = True) -> Published:
    device_blocks, host_blocks, newest = report[-3:]
    return Published(_last_position(newest), device_blocks, host_blocks, tokenizer_known)


def _last_position(newest: Sequence[Any]) -> LogPosition | None:
    return _position(newest[0][0]) if newest else None


def _position(entry_id: bytes) -> LogPosition:
    epoch, version = entry_id.split(b"-")
    return LogPosition(int(epoch), int(version))
