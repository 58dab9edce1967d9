"""Which replicas exist, and what each may be used for: the one place that knows. No I/O, no clock.

    source   redis: came by its record, leaves when its lease ends     static: named on the command line, always there
    state    accepting | draining | incompatible | gone

An incompatible replica computes other keys for the same prompt than this router does: it takes work, but nothing that
is known of its cache means anything here. `draining` may be the replica's own wish or that of this router's operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from shared.fleet_state import CostCoefficients, ReplicaLoad, ReplicaRecord
from shared.prompts import PromptEncoder

__all__ = ["Fleet", "FleetReplica", "Namespace"]

_UNUSED_ENCODERS = 4
"""Kept, memo and all, for a model whose replicas are away for a moment."""
_REMEMBERED_DRAINS = 256

State = Literal["accepting", "draining", "incompatible", "gone"]


@dataclass(slots=True, eq=False)
class FleetReplica:
    """One replica, the same object for as long as it stays; who still holds it afterwards sees that it is gone."""

    id: str
    url: str
    source: Literal["redis", "static"]
    model: str | None = None
    """None: not known; it is asked for whatever model a request names."""
    record: ReplicaRecord | None = None
    last_seen_seconds: float = 0.0
    """When its lease was last seen, by the clock of whoever updates it."""
    drain_asked: bool = False
    incompatibility: str | None = None
    """Why its cache cannot be known here, in words for the operator."""
    gone: bool = False
    # What every decision reads of every replica is kept ready: see `settle`.
    accepting: bool = field(init=False, default=True)
    """Takes new work."""
    publishes: bool = field(init=False, default=False)
    """What it holds stands in the index, under keys that this router computes alike."""
    replica_class: str = field(init=False, default="")
    load: ReplicaLoad | None = field(init=False, default=None)
    cost: CostCoefficients | None = field(init=False, default=None)
    onload_seconds_per_token: float | None = field(init=False, default=None)

    @property
    def state(self) -> State:
        if self.gone:
            return "gone"
        if self.drain_asked or (self.record is not None and self.record.state == "draining"):
            return "draining"
        return "accepting" if self.incompatibility is None else "incompatible"

    def settle(self) -> None:
        """To be called when anything above has changed."""
        self.accepting = self.state in ("accepting", "incompatible")
        if (record := self.record) is not None:
            self.publishes = self.incompatibility is None
            self.replica_class, self.load, self.cost = record.replica_class, record.load, record.cost
            self.onload_seconds_per_token = record.onload_seconds_per_token


class Namespace(NamedTuple):
    """How the keys of a model's prompts are computed. A fleet between two versions of a model has two."""

    fingerprint: str
    block_size: int
    context_tokens: int
    encoder: PromptEncoder | None
    """None until its tokenizer has been fetched."""


class Fleet:
    """Cheap to walk through: tuples made when something changes, not when somebody asks."""

    def __init__(self) -> None:
        self._replicas: dict[str, FleetReplica] = {}
        self._encoders: dict[str, PromptEncoder] = {}
        self._drained: dict[str, float] = {}
        self._listeners: list[Callable[[], None]] = []
        self._all: tuple[FleetReplica, ...] = ()
        self._serving: dict[str, tuple[FleetReplica, ...]] = {}
        self._accepting: dict[str, tuple[FleetReplica, ...]] = {}
        self._namespaces: dict[str, tuple[Namespace, ...]] = {}

    def __iter__(self) -> Iterator[FleetReplica]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def get(self, replica_id: str) -> FleetReplica | None:
        return self._replicas.get(replica_id)

    @property
    def models(self) -> list[str]:
        """Names that replicas say they serve."""
        return sorted({replica.model for replica in self._all if replica.model is not None})

    def serving(self, model: str) -> tuple[FleetReplica, ...]:
        """Replicas that have this model, or have not said which they have; in whatever state."""
        if model not in self._serving and model in self.models:
            self._serving[model] = tuple(replica for replica in self._all if replica.model in (model, None))
        return self._serving.get(model) or tuple(replica for replica in self._all if replica.model is None)

    def accepting(self, model: str = "") -> tuple[FleetReplica, ...]:
        """Those of them that take new work; of all replicas where no model is named."""
        found = self._accepting.get(model)
        if found is None:
            serving = self.serving(model) if model else self._all
            found = tuple(replica for replica in serving if replica.accepting)
            if not model or model in self._serving:
                self._accepting[model] = found
        return found

    def namespaces(self, model: str) -> tuple[Namespace, ...]:
        """Of the compatible replicas that have this model, the most common first; empty if none publishes."""
        found = self._namespaces.get(model)
        if found is None:
            records = [r.record for r in self.serving(model) if r.record is not None and r.incompatibility is None]
            kinds = Counter((r.fingerprint, r.block_size, r.context_tokens, r.tokenizer) for r in records)
            found = tuple(
                Namespace(fingerprint, block_size, context_tokens, self._encoders.get(tokenizer))
                for (fingerprint, block_size, context_tokens, tokenizer), _ in kinds.most_common()
            )
            if records:  # names that nobody serves are not remembered: clients make them up
                self._namespaces[model] = found
        return found

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Called whenever a replica has come or gone."""
        self._listeners.append(listener)

    def add_static(self, url: str, model: str | None = None) -> FleetReplica:
        """A replica that is there whatever Redis says. Its id is the host and port of its URL."""
        replica = FleetReplica(id=urlsplit(url).netloc, url=url.rstrip("/"), source="static", model=model)
        self._join(replica)
        return replica

    def set_model(self, replica_id: str, model: str | None) -> None:
        """What a static replica said it serves."""
        if (replica := self._replicas.get(replica_id)) is not None and replica.model != model:
            replica.model = model
            self._forget_views()

    def update(self, record: ReplicaRecord, now_seconds: float) -> FleetReplica:
        """A record was read, its lease running: the replica joins, or is known better."""
        replica = self._replicas.get(record.id)
        if replica is None or replica.source != "redis":
            replica = FleetReplica(id=record.id, url=record.url, source="redis")
            # The operator drained a process, not a name: its successor starts afresh.
            replica.drain_asked = self._drained.get(record.id) == record.started_at
            self._know(replica, record, now_seconds)
            self._join(replica)
        else:
            changed = replica.record is None or _views_of(replica.record) != _views_of(record)
            succeeded = replica.record is not None and replica.record.started_at != record.started_at
            if succeeded:
                replica.drain_asked = False
            self._know(replica, record, now_seconds)
            if succeeded:  # by another process, perhaps elsewhere
                self._changed()
            elif changed:
                self._forget_views()
        return replica

    def leave(self, replica_id: str) -> None:
        """The replica takes part in nothing from now on. Unknown ids are fine."""
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            replica.gone = True
            replica.settle()
            self._changed()

    def drain(self, replica_id: str, asked: bool = True) -> bool:
        """The operator's wish: no new work, or work again. False if there is no such replica."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return False
        replica.drain_asked = asked
        replica.settle()
        self._forget_views()
        if not asked:
            self._drained.pop(replica_id, None)
        elif replica.record is not None:
            self._drained[replica_id] = replica.record.started_at
            if len(self._drained) > _REMEMBERED_DRAINS:
                del self._drained[next(iter(self._drained))]
        return True

    def drains(self) -> dict[str, float | None]:
        """Replicas that are to drain, with when each was started where its record says so: see `adopt_drains`."""
        static = {replica.id: None for replica in self._all if replica.drain_asked and replica.source == "static"}
        return {**self._drained, **static}

    def adopt_drains(self, drains: Mapping[str, float | None]) -> None:
        """What another worker was asked for; of replicas that are not here yet, too."""
        for replica_id, started_at in drains.items():
            replica = self._replicas.get(replica_id)
            if started_at is not None:
                self._drained[replica_id] = started_at
            if replica is not None and started_at == (replica.record.started_at if replica.record else None):
                replica.drain_asked = True
                replica.settle()
        self._forget_views()

    def set_incompatibility(self, replica_id: str, reason: str | None) -> None:
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.incompatibility != reason:
            replica.incompatibility = reason
            replica.settle()
            self._forget_views()

    def encoder(self, tokenizer: str) -> PromptEncoder | None:
        return self._encoders.get(tokenizer)

    def set_encoder(self, tokenizer: str, encoder: PromptEncoder) -> None:
        self._encoders[tokenizer] = encoder
        self._forget_views()

    def _know(self, replica: FleetReplica, record: ReplicaRecord, now_seconds: float) -> None:
        replica.record, replica.url, replica.model = record, record.url.rstrip("/"), record.model
        replica.last_seen_seconds = now_seconds
        replica.settle()

    def _join(self, replica: FleetReplica) -> None:
        self._replicas[replica.id] = replica
        self._changed()

    def _changed(self) -> None:
        self._all = tuple(self._replicas.values())
        wanted = {replica.record.tokenizer for replica in self._all if replica.record is not None}
        unused = [tokenizer for tokenizer in self._encoders if tokenizer not in wanted]
        for tokenizer in unused[:-_UNUSED_ENCODERS]:
            del self._encoders[tokenizer]
        self._forget_views()
        for listener in self._listeners:
            listener()

    def _forget_views(self) -> None:
        self._serving.clear()
        self._accepting.clear()
        self._namespaces.clear()


def _views_of(record: ReplicaRecord) -> tuple[object, ...]:
    """The fields that tuples depend on: load and position change each second, these hardly ever."""
    which = (record.model, record.fingerprint, record.block_size, record.context_tokens, record.tokenizer)
    return (*which, record.state, record.started_at)
