"""The router: everything wired together, started, and stopped without losing a stream.

async with Router(settings) as router:     serving on router.url
    await router.drain(hurry)              /ready says 503, what is in flight finishes within the grace
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from prometheus_client.core import Metric

from router.admission import Admission
from router.api_keys import ApiKeys
from router.block_index import BlockIndex
from router.candidates import Candidates
from router.client_connection import ClientLimits
from router.client_server import ClientServer
from router.control import Control
from router.dashboard.dashboard import Dashboard
from router.decision_log import DecisionLog
from router.dispatcher import Dispatcher
from router.fleet import Fleet
from router.follower import Follower
from router.gauges import Gauges
from router.headers import RequestHeaders
from router.health import Health
from router.metrics import RouterMetrics
from router.placement import APPROXIMATE, BLIND, EXACT, STALE, Placement, View
from router.policies import build_policy
from router.prober import Prober
from router.prompt_reader import PromptReader
from router.proxy import Limits, Proxy
from router.public_prompts import PublicPrompts
from router.retries import Retries
from router.shared_work import Journal, OthersWork
from router.siblings import Siblings
from router.tls import ServerTls, replica_context
from router.tracing import BeginTrace, trace_of
from router.upstream import Upstream
from router.work_exchange import WorkExchange
from shared.fleet_state import FleetState
from shared.settings import RouterSettings
from shared.telemetry import fields

__all__ = ["Router"]

_TOKENIZING_THREADS = 2
_LAST_WORDS_SECONDS = 1.0
"""For streams that were cut off to tell their clients."""

_logger = logging.getLogger(__name__)


class Router:
    """One router. An async context manager: within it, it serves on `url`."""

    def __init__(
        self, settings: RouterSettings, siblings: Siblings | None = None, begin_trace: BeginTrace = trace_of
    ) -> None:
        """`siblings` where it is one of several workers.

        Raises UnknownPolicyError, ApiKeysError, PublicPromptsError and TlsError.
        """
        self._settings = settings
        self._siblings = siblings
        self._begin_trace = begin_trace
        self.api_keys = ApiKeys(Path(settings.api_keys)) if settings.api_keys is not None else None
        self._public = _public_prompts(settings)
        self.tls = _server_tls(settings)
        self._replica_tls = replica_context(Path(settings.tls_ca)) if settings.tls_ca else None
        self._stack = AsyncExitStack()
        self._follower: Follower | None = None
        self.fleet = Fleet()
        self.index = BlockIndex()
        self.health = Health()
        self.admission = Admission(
            settings.max_in_flight,
            settings.max_queue,
            settings.max_queue_seconds,
            self.api_keys.weight_of if self.api_keys is not None else lambda tenant: 1.0,
        )
        self.retries = Retries(settings.retry_budget, settings.retry_unanswered)
        self._journal = Journal(secrets.token_hex(8)) if settings.redis is not None else None
        self.placement = Placement(
            self.index, build_policy(settings.policy), build_policy("consistent-hash"), journal=self._journal
        )
        self.metrics = RouterMetrics(self._gauges)
        self.url = ""
        self._proxy: Proxy
        self._upstream: Upstream

    async def __aenter__(self) -> Router:
        """Raises OSError when the address cannot be bound, ValueError on a URL that cannot be Redis.

        DecisionLogError when that log cannot be written.
        """
        async with self._stack:
            await self._start()
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    @property
    def view(self) -> View:
        """The rung of the ladder; where no replica publishes, what was sent to each is all there is to know."""
        step = self._follower.view.step if self._follower is not None else "hash"
        if step == "hash":
            return BLIND if any(replica.publishes for replica in self.fleet) else APPROXIMATE
        return EXACT if step == "exact" else STALE

    @property
    def _watched(self) -> list[ApiKeys | PublicPrompts | ServerTls]:
        return [watched for watched in (self.api_keys, self._public, self.tls) if watched is not None]

    def reload(self) -> None:
        """Read again what may be replaced while serving; what cannot be used leaves what was valid before."""
        if not self._watched:
            _logger.info("nothing to reload: no file is given that may be replaced while serving")
        for watched in self._watched:
            watched.reload()

    async def drain(self, hurry: asyncio.Event) -> None:
        """No new requests; those in flight end by themselves, or when the grace or the patience is over."""
        self.admission.close()
        if self.admission.in_flight:
            _logger.info("finishing what is in flight", extra=fields(requests=self.admission.in_flight))
        idle, hurried = (asyncio.ensure_future(waiting) for waiting in (self.admission.idle(), hurry.wait()))
        await asyncio.wait((idle, hurried), timeout=self._settings.grace_seconds, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not idle.done():
            _logger.warning("cutting off what is still in flight", extra=fields(requests=self.admission.in_flight))
            self._proxy.cut_off()
            await asyncio.wait((idle,), timeout=_LAST_WORDS_SECONDS)
        idle.cancel()

    async def _start(self) -> None:
        settings, stack = self._settings, self._stack
        executor = stack.enter_context(ThreadPoolExecutor(_TOKENIZING_THREADS, "tokenize"))
        upstream = await stack.enter_async_context(
            Upstream(
                connect_timeout_seconds=settings.connect_timeout_seconds,
                first_byte_timeout_seconds=settings.first_byte_timeout_seconds,
                chunk_timeout_seconds=settings.chunk_timeout_seconds,
                request_timeout_seconds=settings.request_timeout_seconds,
                tls=self._replica_tls,
            )
        )
        self._upstream = upstream
        self.fleet.subscribe(self._retain)
        self.placement.trust.subscribe(self._tell_of_doubt)
        reader = PromptReader(executor)
        candidates = Candidates(self.fleet, self.health, reader, lambda: self.view, settings.secret, self._public)
        headers = RequestHeaders(settings.admin_key, settings.upstream_key, settings.secret)
        self._proxy = Proxy(
            candidates,
            self.placement,
            upstream,
            self.health,
            self.admission,
            self.metrics,
            Limits(
                settings.max_body_bytes,
                settings.max_retries,
                settings.request_timeout_seconds,
                settings.expect_cached,
            ),
            self.retries,
            headers,
            self._decision_log(),
            self._begin_trace,
        )
        control = Control(
            self.fleet,
            self.index,
            candidates,
            self.placement,
            self.health,
            self.admission,
            self.metrics,
            max_body_bytes=settings.max_body_bytes,
            admin_key=settings.admin_key,
            admin_open=self.api_keys is None,
            siblings=self._siblings,
        )
        statics = [self.fleet.add_static(url) for url in settings.replica]
        prober = Prober(self.fleet, self.health, upstream, statics, headers.of_probes, self._leases_tell)
        stack.push_async_callback(_cancelled, asyncio.create_task(prober.run()))
        if settings.redis is not None:
            fleet_state = FleetState(settings.redis, settings.cluster, settings.secret)
            stack.push_async_callback(fleet_state.close)
            self._follower = Follower(fleet_state, self.fleet, self.index, settings.secret)
            self._follower.start()
            stack.push_async_callback(self._follower.stop)
            self._share_work(fleet_state)
        for watched in self._watched:
            stack.push_async_callback(_cancelled, asyncio.create_task(watched.watch()))
        dashboard = Dashboard(control, self.metrics, self.admission, self._follower, self._siblings)
        stack.push_async_callback(_cancelled, asyncio.create_task(dashboard.run()))
        if self._siblings is not None:
            await self._siblings.start()
            stack.push_async_callback(self._siblings.stop)
            await control.learn_drains()
        await self._listen(Dispatcher(self._proxy, control, dashboard, self.metrics, self.admission, self.api_keys))

    def _leases_tell(self) -> bool:
        """Redis says which of the replicas that came by it are alive."""
        return self._follower is None or self._follower.connected

    def _decision_log(self) -> DecisionLog | None:
        if self._settings.decision_log is None:
            return None
        log = DecisionLog(Path(self._settings.decision_log), self._settings.decision_log_bytes)
        self._stack.callback(log.close)
        return log

    def _share_work(self, fleet_state: FleetState) -> None:
        assert self._journal is not None
        others = OthersWork(self.placement.ledger, lambda replica_id: self.fleet.get(replica_id) is not None)
        exchange = WorkExchange(fleet_state, self._journal, others)
        exchange.start()
        self._stack.push_async_callback(exchange.stop)

    async def _listen(self, dispatcher: Dispatcher) -> None:
        settings = self._settings
        limits = ClientLimits(
            max_connections=settings.max_connections,
            max_head_bytes=settings.max_head_bytes,
            max_body_bytes=settings.max_body_bytes,
            head_timeout_seconds=settings.head_timeout_seconds,
            body_timeout_seconds=settings.body_timeout_seconds,
            unread_timeout_seconds=settings.unread_timeout_seconds,
            idle_timeout_seconds=settings.idle_timeout_seconds,
            handshake_timeout_seconds=settings.tls_handshake_timeout_seconds,
        )
        server = ClientServer(dispatcher, limits)
        tls = self.tls.context if self.tls is not None else None
        port = await server.listen(settings.host, settings.port, tls, shared_port=self._siblings is not None)
        self._stack.push_async_callback(server.close, _LAST_WORDS_SECONDS)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"{'http' if self.tls is None else 'https'}://{host}:{port}"

    def _retain(self) -> None:
        ids = {replica.id for replica in self.fleet}
        self.placement.retain(ids)
        self.health.retain({each.id: each.record.started_at if each.record else 0.0 for each in self.fleet})
        self.metrics.retain(ids)
        self._upstream.retain(replica.url for replica in self.fleet)

    def _tell_of_doubt(self, replica_id: str, doubted: bool) -> None:
        about = fields(replica=replica_id, trust=self.placement.trust.factor(replica_id))
        if doubted:
            _logger.warning("a replica's cache holds less than it publishes: it counts for less", extra=about)
        else:
            _logger.info("a replica's cache holds what it publishes again", extra=about)

    def _gauges(self) -> Iterator[Metric]:
        state = (self.fleet, self.index, self.placement, self.health, self.admission, self.retries)
        return Gauges(*state, view=lambda: self.view, follower=self._follower).families()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _public_prompts(settings: RouterSettings) -> PublicPrompts | None:
    if settings.public_prefixes is None:
        return None
    return PublicPrompts(Path(settings.public_prefixes), settings.secret)


def _server_tls(settings: RouterSettings) -> ServerTls | None:
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    return ServerTls(Path(settings.tls_certificate), Path(settings.tls_key))
