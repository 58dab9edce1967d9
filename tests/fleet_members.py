"""A replica as the fleet sees it: a real publisher, fed by the test instead of an engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from replica.prefix_cache import CacheEvents
from replica.publisher import Publisher
from replica.tiny_tokenizer import tiny_bundle
from shared.blocks import BlockKey, PublishedKey, block_keys, golden_key, namespace_root, published_key
from shared.fleet_state import FleetState, ReplicaRecord
from shared.prompts import PromptEncoder

__all__ = ["BLOCK_SIZE", "Member", "make_record"]

BLOCK_SIZE = 4
_FINGERPRINT = "model-fingerprint"
_BUNDLE = tiny_bundle()
_PACKED = _BUNDLE.pack()
_ENCODER = PromptEncoder(_BUNDLE)


def make_record(replica_id: str = "r1", secret: str = "", **changes: Any) -> ReplicaRecord:
    """A record with which every check succeeds, but for what `changes` says."""
    root = namespace_root(_FINGERPRINT, secret=secret)
    record = ReplicaRecord(
        id=replica_id,
        url=f"http://{replica_id}:8000",
        model="tiny",
        fingerprint=_FINGERPRINT,
        golden_key=golden_key(root, BLOCK_SIZE),
        golden_prompt_key=_ENCODER.golden_prompt_key(root, BLOCK_SIZE),
        tokenizer=_BUNDLE.digest,
        block_size=BLOCK_SIZE,
        context_tokens=4096,
        capacity_blocks=1000,
        started_at=1.0,
    )
    return msgspec.structs.replace(record, **changes)


class Member:
    """Holds chains of blocks under the namespace of `make_record`'s fingerprint."""

    def __init__(self, redis_url: str, replica_id: str = "r1", secret: str = "", **changes: Any) -> None:
        self.id = replica_id
        self.record = make_record(replica_id, secret, **changes)
        self.root = namespace_root(self.record.fingerprint, secret=secret)
        self.held: set[BlockKey] = set()
        self._state = FleetState(redis_url, secret=secret, timeout_seconds=1.0)
        self.publisher = Publisher(self._state, lambda: self.record, _PACKED)

    async def __aenter__(self) -> Member:
        self.publisher.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.publisher.stop()
        await self._state.close()

    async def crash(self) -> None:
        """Ends without a goodbye."""
        assert self.publisher._task is not None
        self.publisher._task.cancel()
        self.publisher._task = None

    def chain(self, tokens: Iterable[int]) -> list[BlockKey]:
        return block_keys(self.root, list(tokens), BLOCK_SIZE)

    def keys(self, tokens: Iterable[int]) -> list[PublishedKey]:
        """As a router would compute them for this prompt."""
        return [published_key(key) for key in self.chain(tokens)]

    def compute(self, tokens: Iterable[int]) -> None:
        self.change(stored=set(self.chain(tokens)) - self.held)

    def change(self, stored: Iterable[BlockKey] = (), removed: Iterable[BlockKey] = ()) -> None:
        new, gone = list(stored), list(removed)
        self.held = (self.held | set(new)) - set(gone)
        self.publisher.offer(CacheEvents(new, gone))
