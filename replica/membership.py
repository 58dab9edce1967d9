"""A replica's place in the fleet: what it says about itself, and to whom.

With no Redis set it is a replica all the same, which publishes nothing and can be given to a router by its URL.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.metadata import version

from replica.backend import Backend
from replica.cache_events import CacheEvents
from replica.publisher import Publisher
from replica.service import Service
from shared.blocks import ModelIdentity, golden_key, namespace_root
from shared.fleet_records import ReplicaRecord
from shared.fleet_state import FleetState
from shared.prompts import PromptEncoder

__all__ = ["Identity", "Membership", "identify"]


@dataclass(frozen=True, slots=True)
class Identity:
    """What never changes about a replica. Equal fingerprints mean equal KV for equal tokens."""

    id: str
    url: str
    model: str
    fingerprint: str
    golden_key: str
    golden_prompt_key: str


def identify(replica_id: str, url: str, model: str, backend: Backend, encoder: PromptEncoder, secret: str) -> Identity:
    block_size = backend.runner.block_size
    digests = (backend.bundle.digest, backend.bundle.template_digest)
    fingerprint = ModelIdentity(backend.weights_id, *digests, block_size).fingerprint
    root = namespace_root(fingerprint, secret=secret)
    return Identity(
        id=replica_id,
        url=url,
        model=model,
        fingerprint=fingerprint,
        golden_key=golden_key(root, block_size),
        golden_prompt_key=encoder.golden_prompt_key(root, block_size),
    )


class Membership:
    """Joined with `join`, left with `leave`; in between the publisher keeps the lease and the published keys."""

    def __init__(self, identity: Identity, backend: Backend, fleet_state: FleetState | None, token_budget: int) -> None:
        self._identity = identity
        self._backend = backend
        self._fleet_state = fleet_state
        self._token_budget = token_budget
        self._started_at = time.time()
        self._service: Service | None = None
        self._publisher: Publisher | None = None
        if fleet_state is not None:
            self._publisher = Publisher(fleet_state, self.record, backend.bundle.pack())

    def offer(self, events: CacheEvents) -> None:
        """Called by the engine's thread."""
        if self._publisher is not None:
            self._publisher.offer(events)

    def join(self, service: Service) -> None:
        self._service = service
        if self._publisher is not None:
            self._publisher.start()

    def announce_soon(self) -> None:
        """The record changed in a way that routers should learn now."""
        if self._publisher is not None:
            self._publisher.announce_soon()

    async def leave(self) -> None:
        if self._publisher is not None:
            await self._publisher.stop()
        if self._fleet_state is not None:
            await self._fleet_state.close()

    def record(self) -> ReplicaRecord:
        """The replica as it is now; the publisher adds epoch and version."""
        assert self._service is not None, "join() comes first"
        identity, backend, model = self._identity, self._backend, self._service.model
        state = self._service.engine.state()
        step_cost = state.cost or backend.cost
        return ReplicaRecord(
            id=identity.id,
            url=identity.url,
            model=identity.model,
            fingerprint=identity.fingerprint,
            golden_key=identity.golden_key,
            golden_prompt_key=identity.golden_prompt_key,
            tokenizer=backend.bundle.digest,
            block_size=model.block_size,
            context_tokens=model.context_tokens,
            capacity_blocks=backend.runner.num_blocks,
            host_capacity_blocks=backend.runner.host_blocks,
            tiers=("device", "host") if backend.runner.host_blocks else ("device",),
            replica_class=backend.replica_class,
            load=state.load,
            cost=step_cost.of_prefill(self._token_budget) if step_cost is not None else None,
            onload_seconds_per_token=state.onload_seconds_per_token,
            state="draining" if self._service.draining else "accepting",
            started_at=self._started_at,
            package_version=version("warmroute"),
        )
