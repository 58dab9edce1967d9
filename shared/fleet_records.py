"""What a replica says about itself and its cache, and how it stands in Redis.

record   JSON                                             (no cluster secret)
         JSON "\\n" hex HMAC-SHA256 of the JSON            (with one)
delta    a stream entry `<epoch>-<version>` with fields
         stored, removed, host_stored, host_removed       little-endian uint64 arrays; empty ones are absent
         count, checksum, host_count, host_checksum       decimal: what the tiers hold *after* this delta
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec

from shared.blocks import PublishedKey, pack_keys, unpack_keys

__all__ = [
    "CostCoefficients",
    "Delta",
    "DeltaError",
    "LogEntry",
    "LogPosition",
    "Published",
    "RecordError",
    "ReplicaLoad",
    "ReplicaRecord",
    "ReplicaState",
    "Snapshot",
    "decode_delta",
    "decode_record",
    "encode_delta",
    "encode_record",
]

ReplicaState = Literal["accepting", "draining", "gone"]
"""`gone` is a goodbye, left for one lease: without it, a replica that Redis merely lost would look the same."""

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class ReplicaLoad(msgspec.Struct, frozen=True):
    """What the engine has in hand now."""

    running: _Count = 0
    waiting: _Count = 0
    queued_prefill_tokens: _Count = 0
    free_blocks: _Count = 0
    evictable_blocks: _Count = 0


class CostCoefficients(msgspec.Struct, frozen=True):
    """Seconds of prefill: base + per_token * u + per_token_context * u * L (u uncached, L prompt tokens)."""

    base_seconds: float
    per_token_seconds: float
    per_token_context_seconds: float

    def of_prefill(self, token_budget: int) -> CostCoefficients:
        """From those of a step: a prefill goes in steps of at most so many tokens, and each of them pays the base."""
        per_token = self.per_token_seconds + self.base_seconds / token_budget
        return CostCoefficients(self.base_seconds, per_token, self.per_token_context_seconds)


class ReplicaRecord(msgspec.Struct, frozen=True):
    """A replica's lease, renewed each second."""

    id: _Name
    url: _Name
    model: _Name
    fingerprint: _Name
    golden_key: str
    """The chained key of a fixed token list under the fingerprint: unequal here, equal nowhere."""
    golden_prompt_key: str
    """The same of a fixed prompt: proves tokenizer and template too."""
    tokenizer: str
    """Digest of the `TokenizerBundle` that renders and tokenizes prompts for this replica."""
    block_size: _Positive
    context_tokens: _Positive
    capacity_blocks: _Positive
    epoch: _Count = 0
    version: _Count = 0
    host_capacity_blocks: _Count = 0
    tiers: tuple[str, ...] = ("device",)
    replica_class: str = ""
    """Replicas of one class (model, device, engine) cost the same for the same work."""
    load: ReplicaLoad = ReplicaLoad()
    cost: CostCoefficients | None = None
    onload_seconds_per_token: _Seconds | None = None
    """To bring a token's KV back from host memory; None: not measured yet."""
    state: ReplicaState = "accepting"
    started_at: float = 0.0
    """Unix time in seconds."""
    package_version: str = ""


class LogPosition(NamedTuple):
    """A place in a replica's log, ordered as its entries are."""

    epoch: int
    version: int


class Delta(msgspec.Struct, frozen=True):
    """One step of a replica's published keys. Lists are net and disjoint; counts and checksums are those after it."""

    epoch: int
    version: int
    stored: Sequence[PublishedKey] = ()
    removed: Sequence[PublishedKey] = ()
    host_stored: Sequence[PublishedKey] = ()
    host_removed: Sequence[PublishedKey] = ()
    count: int = 0
    checksum: int = 0
    host_count: int = 0
    host_checksum: int = 0

    @property
    def position(self) -> LogPosition:
        return LogPosition(self.epoch, self.version)


class LogEntry(NamedTuple):
    """An entry read from a replica's log; `delta` is None where it cannot be understood."""

    replica_id: str
    position: LogPosition
    delta: Delta | None


class Snapshot(NamedTuple):
    """All that one replica publishes, read at one instant. `last` is its newest log entry, lists left out."""

    record: ReplicaRecord
    device_keys: Sequence[PublishedKey]
    host_keys: Sequence[PublishedKey]
    last: Delta


class Published(NamedTuple):
    """What stands in Redis for a replica after a write: its publisher compares that with what it believes."""

    last: LogPosition | None
    device_blocks: int
    host_blocks: int
    tokenizer_known: bool = True


class RecordError(Exception):
    """A record that must not be used. The message is the reason."""


class DeltaError(Exception):
    """A log entry that no publisher of ours wrote."""


_decode_json = msgspec.json.Decoder(ReplicaRecord).decode


def encode_record(record: ReplicaRecord, secret: str) -> bytes:
    body = msgspec.json.encode(record)
    return body + b"\n" + _signature(body, secret) if secret else body


def decode_record(replica_id: str, value: bytes, secret: str) -> ReplicaRecord:
    """The record under `replica:<replica_id>`. Raises RecordError unless it is whole, signed and its own."""
    body, _, signature = value.partition(b"\n")
    if secret and not signature:
        raise RecordError("it is not signed; give the replica the cluster's secret")
    if secret and not hmac.compare_digest(signature, _signature(body, secret)):
        raise RecordError("its signature is wrong; its secret is not the cluster's")
    try:
        record = _decode_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"it cannot be read: {error}") from None
    if record.id != replica_id:  # a signed record copied to another name
        raise RecordError(f"it is the record of {record.id!r}")
    return record


def encode_delta(delta: Delta) -> dict[str, bytes | int]:
    """The fields of the stream entry; its id is the position."""
    keys = {
        "stored": delta.stored,
        "removed": delta.removed,
        "host_stored": delta.host_stored,
        "host_removed": delta.host_removed,
    }
    fields: dict[str, bytes | int] = {name: pack_keys(listed) for name, listed in keys.items() if listed}
    return fields | {
        "count": delta.count,
        "checksum": delta.checksum,
        "host_count": delta.host_count,
        "host_checksum": delta.host_checksum,
    }


def decode_delta(position: LogPosition, fields: Mapping[bytes, bytes]) -> Delta:
    """The inverse of `encode_delta`. Raises DeltaError."""
    try:
        return Delta(
            *position,
            stored=unpack_keys(fields.get(b"stored", b"")),
            removed=unpack_keys(fields.get(b"removed", b"")),
            host_stored=unpack_keys(fields.get(b"host_stored", b"")),
            host_removed=unpack_keys(fields.get(b"host_removed", b"")),
            count=int(fields[b"count"]),
            checksum=int(fields[b"checksum"]),
            host_count=int(fields[b"host_count"]),
            host_checksum=int(fields[b"host_checksum"]),
        )
    except (KeyError, ValueError) as error:
        raise DeltaError(repr(error)) from None


def _signature(body: bytes, secret: str) -> bytes:
    return hmac.digest(secret.encode(), body, "sha256").hex().encode()
