"""Asks servers that do not publish themselves whether they are alive and which model they serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from router.fleet import Fleet, FleetReplica
from router.health import Health
from router.upstream import Upstream, UpstreamError
from shared.telemetry import fields

__all__ = ["Prober"]

_PERIOD_SECONDS = 2.0
_TIMEOUT_SECONDS = 2.0
_FAILURES_TO_DOWN = 2
_SUCCESSES_TO_UP = 2
_MOST_ANSWER_BYTES = 1 << 20

_logger = logging.getLogger(__name__)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_decode_models = msgspec.json.Decoder(_Models).decode


class Prober:
    """Two failed probes in a row take a replica out, two good ones bring it back; the first one decides at once."""

    def __init__(
        self, fleet: Fleet, health: Health, upstream: Upstream, replicas: Sequence[FleetReplica], headers: bytes
    ) -> None:
        """`headers` must not keep connections open: a probe is to prove that a new one can be made."""
        self._fleet = fleet
        self._health = health
        self._upstream = upstream
        self._replicas = replicas
        self._headers = headers
        self._refused: set[str] = set()
        """Replicas that want a key, of which the log has told."""
        for replica in replicas:
            health.set_reachable(replica.id, False)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for replica in self._replicas:
                group.create_task(self._watch(replica))

    async def _watch(self, replica: FleetReplica) -> None:
        reachable: bool | None = None  # not known yet
        failures = successes = 0
        while True:
            try:
                await self._probe(replica)
            except UpstreamError as error:
                failures, successes = failures + 1, 0
                if reachable is None or (reachable and failures >= _FAILURES_TO_DOWN):
                    reachable = False
                    self._health.set_reachable(replica.id, False)
                    self._upstream.lose(replica.url)
                    _logger.warning("replica unreachable", extra=fields(replica=replica.id, reason=str(error)))
            else:
                failures, successes = 0, successes + 1
                if reachable is None or (not reachable and successes >= _SUCCESSES_TO_UP):
                    reachable = True
                    self._health.set_reachable(replica.id, True)
                    _logger.info("replica reachable", extra=fields(replica=replica.id, model=replica.model))
            await asyncio.sleep(_PERIOD_SECONDS)

    async def _probe(self, replica: FleetReplica) -> None:
        """Alive, and which model: the first one listed; a server that lists none is asked for any model."""
        # A server without /health says 404, and is alive.
        status, _ = await self._get(replica, "/health")
        if status >= 500:
            raise UpstreamError("broken", f"/health answered {status}")
        status, body = await self._get(replica, "/v1/models")
        self._tell_of_key(replica.id, wanted=status == HTTPStatus.UNAUTHORIZED)
        try:
            models = _decode_models(body).data if status == 200 else []
        except (msgspec.DecodeError, UnicodeDecodeError):
            models = []
        self._fleet.set_model(replica.id, models[0].id if models else None)

    def _tell_of_key(self, replica_id: str, wanted: bool) -> None:
        """Clients may have one. Once."""
        if not wanted:
            self._refused.discard(replica_id)
        elif replica_id not in self._refused:
            self._refused.add(replica_id)
            reason = "it asks for another key than this router's: see WARMROUTE_UPSTREAM_KEY"
            _logger.warning("replica does not say what it serves", extra=fields(replica=replica_id, reason=reason))

    async def _get(self, replica: FleetReplica, path: str) -> tuple[int, bytes]:
        response = await self._upstream.open("GET", replica.url, path, self._headers, b"", _TIMEOUT_SECONDS)
        try:
            body = b""
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                while (chunk := await response.read()) and len(body) < _MOST_ANSWER_BYTES:
                    body += chunk
            return response.status, body
        except TimeoutError:
            raise UpstreamError("timeout", f"{path} did not end within {_TIMEOUT_SECONDS:g} s") from None
        finally:
            response.close()
