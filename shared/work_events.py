"""What routers tell each other of the work they have sent, so that several together decide as one.

A batch is one entry of the `work` stream: fields `router`, `batch` (MessagePack) and, under a cluster secret, `seal`
(HMAC-SHA256 of the two). A router counts its batches: whoever misses one has missed an end, and forgets what it knew.
A *fresh* batch says all that is under way, whatever was said before.

Entries that cannot be read (a newer version's, somebody else's) are passed over: they cost accuracy, nothing else.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec

__all__ = ["Dispatched", "Ended", "FirstToken", "WorkBatch", "WorkEvent", "WorkRead", "decode_work", "encode_work"]

_Count = Annotated[int, msgspec.Meta(ge=0)]


class Dispatched(msgspec.Struct, frozen=True, array_like=True, tag="d", gc=False):
    """A request went to a replica, which has `uncached_tokens` of its prompt to compute."""

    number: _Count
    """The dispatching router's own."""
    replica_id: str
    service_seconds: Annotated[float, msgspec.Meta(ge=0, le=86_400)]
    uncached_tokens: _Count
    streamed: bool
    promised: bytes
    """Keys that it will bring into being, packed; of a long run the beginning."""


class FirstToken(msgspec.Struct, frozen=True, array_like=True, tag="f", gc=False):
    number: _Count


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="e", gc=False):
    """The request is over, in whatever way."""

    number: _Count


WorkEvent = Dispatched | FirstToken | Ended


class WorkBatch(msgspec.Struct, frozen=True, array_like=True):
    """One router's events, in the order of happening. Without events it is a sign of life."""

    router_id: str
    number: _Count
    fresh: bool
    events: list[WorkEvent]


class WorkRead(NamedTuple):
    """Others' batches after the position asked for, and the position to ask for next."""

    position: str
    batches: list[WorkBatch]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(WorkBatch).decode


def encode_work(batch: WorkBatch, secret: str) -> dict[str, bytes | str]:
    packed = _encode(batch)
    fields: dict[str, bytes | str] = {"router": batch.router_id, "batch": packed}
    return fields | {"seal": _seal(packed, secret)} if secret else fields


def decode_work(fields: Mapping[bytes, bytes], secret: str) -> WorkBatch | None:
    """None for what is not to be believed."""
    packed = fields.get(b"batch", b"")
    if secret and not hmac.compare_digest(fields.get(b"seal", b""), _seal(packed, secret)):
        return None
    try:
        batch = _decode(packed)
    except (UnicodeDecodeError, msgspec.DecodeError):
        return None
    return batch if batch.router_id.encode() == fields.get(b"router") else None


def _seal(packed: bytes, secret: str) -> bytes:
    return hmac.digest(secret.encode(), packed, "sha256")
