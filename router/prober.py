"""Asks servers that do not publish themselves whether they are alive and which model they serve; and all others too,
whether they are alive, while Redis does not say so.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
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


class _Verdict:
    """What the probes of a replica have shown."""

    __slots__ = ("reachable", "row")

    def __init__(self) -> None:
        self.reachable: bool | None = None
        """None: nothing yet."""
        self.row = 0
        """Good probes in a row; bad ones count below zero."""

    def changed_by(self, *, well: bool) -> bool:
        """One more probe; whether it has changed the verdict."""
        self.row = max(self.row, 0) + 1 if well else min(self.row, 0) - 1
        enough = self.row >= _SUCCESSES_TO_UP if well else self.row <= -_FAILURES_TO_DOWN
        if self.reachable == well or not (enough or self.reachable is None):
            return False
        self.reachable = well
        return True


class Prober:
    """Two failed probes in a row take a replica out, two good ones bring it back; the first one decides at once."""

    def __init__(
        self,
        fleet: Fleet,
        health: Health,
        upstream: Upstream,
        statics: Sequence[FleetReplica],
        headers: bytes,
        leases_tell: Callable[[], bool] = lambda: True,
    ) -> None:
        """`statics` are probed always, all others only while `leases_tell` is false: a replica that freezes then keeps
        its connections, and nothing else would tell.

        `headers` must not keep connections open: a probe is to prove that a new one can be made.
        """
        self._fleet = fleet
        self._health = health
        self._upstream = upstream
        self._statics = statics
        self._headers = headers
        self._leases_tell = leases_tell
        self._refused: set[str] = set()
        """Replicas that want a key, of which the log has told."""
        self._verdicts: defaultdict[str, _Verdict] = defaultdict(_Verdict)
        for replica in statics:
            health.set_reachable(replica.id, False)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for replica in self._statics:
                group.create_task(self._watch(replica))
            group.create_task(self._stand_in_for_leases())

    async def _watch(self, replica: FleetReplica) -> None:
        while True:
            await self._judge(replica, self._probe)
            await asyncio.sleep(_PERIOD_SECONDS)

    async def _stand_in_for_leases(self) -> None:
        judged: set[str] = set()
        while True:
            await asyncio.sleep(_PERIOD_SECONDS)
            if self._leases_tell():
                for replica_id in judged:
                    self._health.set_reachable(replica_id, True)
                    del self._verdicts[replica_id]
                judged.clear()
                continue
            leased = [replica for replica in self._fleet if replica.source == "redis"]
            for replica in leased:
                if replica.id not in judged:
                    judged.add(replica.id)
                    self._verdicts[replica.id].reachable = True
            await asyncio.gather(*(self._judge(replica, self._prove_alive) for replica in leased))

    async def _judge(self, replica: FleetReplica, probe: Callable[[FleetReplica], Awaitable[None]]) -> None:
        verdict = self._verdicts[replica.id]
        try:
            await probe(replica)
        except UpstreamError as error:
            if error.failure != "exhausted" and verdict.changed_by(well=False):
                self._health.set_reachable(replica.id, False)
                self._upstream.lose(replica.url)
                _logger.warning("replica unreachable", extra=fields(replica=replica.id, reason=str(error)))
        else:
            if verdict.changed_by(well=True):
                self._health.set_reachable(replica.id, True)
                _logger.info("replica reachable", extra=fields(replica=replica.id, model=replica.model))

    async def _probe(self, replica: FleetReplica) -> None:
        """Alive, and which model: the first one listed; a server that lists none is asked for any model."""
        await self._prove_alive(replica)
        status, body = await self._get(replica, "/v1/models")
        self._tell_of_key(replica.id, wanted=status == HTTPStatus.UNAUTHORIZED)
        try:
            models = _decode_models(body).data if status == 200 else []
        except (msgspec.DecodeError, UnicodeDecodeError):
            models = []
        self._fleet.set_model(replica.id, models[0].id if models else None)

    async def _prove_alive(self, replica: FleetReplica) -> None:
        # A server without /health says 404, and is alive.
        status, _ = await self._get(replica, "/health")
        if status >= 500:
            raise UpstreamError("broken", f"/health answered {status}")

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
