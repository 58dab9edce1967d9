"""What routers tell each other of the work they have sent, so that several together are as good as one.

A batch is one entry of the `work` stream: fields `router` and `events`, a JSON array in the order of happening.
Entries that cannot be read (a newer version's, somebody else's) are passed over: they cost accuracy, nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

__all__ = ["Dispatched", "Ended", "FirstToken", "WorkBatch", "WorkEvent", "WorkRead", "decode_work", "encode_work"]


class Dispatched(msgspec.Struct, frozen=True, tag_field="kind", tag="dispatched"):
    """A request went to a replica, which has `uncached_tokens` of its prompt to compute."""

    request_id: str
    replica_id: str
    prompt_tokens: int
    uncached_tokens: int


class FirstToken(msgspec.Struct, frozen=True, tag_field="kind", tag="first_token"):
    request_id: str


class Ended(msgspec.Struct, frozen=True, tag_field="kind", tag="ended"):
    """The request is over, in whatever way."""

    request_id: str


WorkEvent = Dispatched | FirstToken | Ended


class WorkBatch(NamedTuple):
    router_id: str
    events: Sequence[WorkEvent]


class WorkRead(NamedTuple):
    """Batches after the position asked for, and the position to ask for next."""

    position: str
    batches: list[WorkBatch]


_decoder = msgspec.json.Decoder(list[WorkEvent])


def encode_work(batch: WorkBatch) -> dict[str, bytes | str]:
    return {"router": batch.router_id, "events": msgspec.json.encode(batch.events)}


def decode_work(fields: Mapping[bytes, bytes]) -> WorkBatch | None:
    try:
        return WorkBatch(fields[b"router"].decode(), _decoder.decode(fields[b"events"]))
    except (KeyError, UnicodeDecodeError, msgspec.DecodeError):
        return None
