"""What the router answers itself: who is in the fleet, what it would decide, how it is doing."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable
from importlib.metadata import version

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from router.admission import Admission
from router.block_index import BlockIndex
from router.bodies import unpacked
from router.candidates import Candidates
from router.client_request import ClientRequest, Response
from router.fleet import Fleet, FleetReplica
from router.gauges import of_process
from router.headers import SESSION_HEADER
from router.health import Health
from router.metrics import RouterMetrics, exposition
from router.placement import NoReplicaError, Placement
from router.siblings import Siblings
from router.worker_metrics import merged, packed
from shared.api import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    GENERATION_PATHS,
    ApiError,
    parse_count_tokens,
    parse_routing,
    parse_tokenize,
)
from shared.api_errors import invalid_value, model_not_found, not_ready

__all__ = ["Control"]

_encode = msgspec.json.Encoder().encode
_decode_drain = msgspec.msgpack.Decoder(tuple[str, bool]).decode
_decode_drains = msgspec.msgpack.Decoder(dict[str, float | None]).decode
_KNOWN, _UNKNOWN = b"known", b"unknown"


class _RouteFields(msgspec.Struct):
    path: str = ""
    messages: msgspec.Raw = msgspec.Raw()


class Control:
    """`admin_key` empty: admin paths are open, as on a developer's machine, unless API keys are asked for."""

    def __init__(
        self,
        fleet: Fleet,
        index: BlockIndex,
        candidates: Candidates,
        placement: Placement,
        health: Health,
        admission: Admission,
        metrics: RouterMetrics,
        *,
        max_body_bytes: int,
        admin_key: str,
        admin_open: bool = True,
        siblings: Siblings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._candidates = candidates
        self._placement = placement
        self._health = health
        self._admission = admission
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._admin_key = admin_key
        self._admin_open = admin_open and not admin_key
        self._clock = clock
        self._started_at = int(time.time())
        self._siblings = siblings
        if siblings is not None:
            siblings.register("metrics", lambda _: self._packed_metrics())
            siblings.register("drain", self._drain_as_told)
            siblings.register("drains", lambda _: msgspec.msgpack.encode(self._fleet.drains()))

    async def health(self, request: ClientRequest) -> Response:
        return _json({"status": "ok"})

    async def ready(self, request: ClientRequest) -> Response:
        """200 when at least one replica takes traffic and this router is not shutting down."""
        if self._admission.closed:
            raise not_ready("this router is shutting down: send traffic to another one")
        taking_work = self._candidates.taking_work()
        if not taking_work:
            raise self._candidates.nobody("")
        return _json({"status": "ready", "replicas": taking_work, "view": self._candidates.view().step})

    async def metrics(self, request: ClientRequest) -> Response:
        # A large fleet's are written by a thread: requests are not to wait for it.
        if self._siblings is None:
            families = list(self._metrics.families())
            body = await asyncio.to_thread(lambda: exposition([*families, *of_process()]))
        else:
            workers = {**await self._siblings.ask("metrics"), self._siblings.number: self._packed_metrics()}
            body = await asyncio.to_thread(lambda: exposition(merged(workers)))
        return Response(body=body, content_type=CONTENT_TYPE_LATEST)

    async def version(self, request: ClientRequest) -> Response:
        return _json({"version": version("warmroute")})

    async def models(self, request: ClientRequest) -> Response:
        """All models that the fleet serves."""
        return _json({"object": "list", "data": [self._card(model) for model in self._fleet.models]})

    async def model(self, request: ClientRequest, model: str) -> Response:
        if model not in self._fleet.models:
            raise model_not_found(model, self._fleet.models)
        return _json(self._card(model))

    async def replicas(self, request: ClientRequest) -> Response:
        """The fleet as this router sees it."""
        return _json({"policy": self.policy, "view": self.view, "replicas": self.describe_replicas()})

    @property
    def policy(self) -> str:
        return self._placement.policy.name

    @property
    def view(self) -> str:
        """The rung of the ladder."""
        return self._candidates.view().step

    def describe_replicas(self) -> list[dict[str, object]]:
        now = self._clock()
        return [self._describe(replica, now) for replica in self._fleet]

    async def route(self, request: ClientRequest) -> Response:
        """A dry run: the decision for this body, every candidate, and the sentence that explains it."""
        text = await self._text(request)
        try:
            given = msgspec.json.decode(text, type=_RouteFields)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, "invalid_json", f"the body is not a JSON object of the right shape: {error}") from None
        path = given.path or (CHAT_PATH if given.messages else COMPLETIONS_PATH)
        if path not in GENERATION_PATHS:
            raise invalid_value("path", f"must be one of {', '.join(GENERATION_PATHS)}")
        routing = parse_routing(path, text)
        asked = await self._candidates.read(routing, request.tenant, request.header(SESSION_HEADER))
        now = self._clock()
        try:
            decision = self._placement.decide(
                asked, self._candidates.of(routing.model, now), now, view=self._candidates.view()
            )
        except NoReplicaError:
            raise self._candidates.nobody(routing.model) from None
        return _json({**msgspec.to_builtins(decision), "sentence": decision.sentence})

    async def tokenize(self, request: ClientRequest) -> Response | None:
        """The token ids of a prompt, by the encoder that routes it; None where only a replica can tell."""
        parsed = parse_tokenize(await self._text(request))
        encoded = await self._candidates.tokenize(parsed)
        if encoded is None:
            return None
        return _json({"tokens": encoded.token_ids, "count": encoded.token_count})

    async def count_tokens(self, request: ClientRequest) -> Response | None:
        """As `tokenize`, in Anthropic's dialect and without the ids."""
        encoded = await self._candidates.tokenize(parse_count_tokens(await self._text(request)))
        return None if encoded is None else _json({"input_tokens": encoded.token_count})

    async def drain(self, request: ClientRequest, replica_id: str, *, draining: bool) -> Response:
        """No new work for that replica, or again new work; what runs there goes on."""
        self.require_admin(request)
        known = self._fleet.drain(replica_id, draining)
        if self._siblings is not None:
            told = await self._siblings.ask("drain", msgspec.msgpack.encode((replica_id, draining)))
            known = known or _KNOWN in told.values()
        if not known:
            message = f"no replica is called {replica_id[:200]!r}: GET /replicas names those there are"
            raise ApiError(404, "replica_not_found", message)
        return _json({"id": replica_id, "draining": draining})

    async def learn_drains(self) -> None:
        """From the other workers: those that were asked for before this one was started."""
        assert self._siblings is not None
        for drains in (await self._siblings.ask("drains")).values():
            self._fleet.adopt_drains(_decode_drains(drains))

    def _drain_as_told(self, told: bytes) -> bytes:
        return _KNOWN if self._fleet.drain(*_decode_drain(told)) else _UNKNOWN

    def _packed_metrics(self) -> bytes:
        return packed([*self._metrics.families(), *of_process()])

    def _card(self, model: str) -> dict[str, object]:
        return {"id": model, "object": "model", "created": self._started_at, "owned_by": "warmroute"}

    def _describe(self, replica: FleetReplica, now: float) -> dict[str, object]:
        record, standing = replica.record, self._placement.ledger.standing(replica.id, now)
        return {
            "id": replica.id,
            "url": replica.url,
            "model": replica.model,
            "state": replica.state,
            "source": replica.source,
            "epoch": record.epoch if record else None,
            "version": record.version if record else None,
            "blocks": self._index.held(replica.id).device.blocks if record else None,
            "capacity_blocks": record.capacity_blocks if record else None,
            "load": record.load if record else None,
            "incompatibility": replica.incompatibility,
            "reachable": self._health.reachable(replica.id),
            "breaker": self._health.state(replica.id, now),
            "trust": self._placement.trust.factor(replica.id),
            "active": standing.active,
            "wait_seconds": standing.wait_seconds,
        }

    def require_admin(self, request: ClientRequest) -> None:
        """Raises ApiError where the admin key is asked for and did not come."""
        if self._admin_open:
            return
        if not self._admin_key:
            raise ApiError(403, "admin_key_not_set", "this path needs an admin key: start with WARMROUTE_ADMIN_KEY set")
        given = (request.header(b"authorization") or b"").removeprefix(b"Bearer ")
        if not hmac.compare_digest(given, self._admin_key.encode()):
            raise ApiError(401, "invalid_admin_key", "this path needs the admin key as Authorization: Bearer KEY")

    async def _text(self, request: ClientRequest) -> bytes:
        return unpacked(await request.read(), request.header(b"content-encoding"), self._max_body_bytes)


def _json(document: object) -> Response:
    return Response(body=_encode(document))
