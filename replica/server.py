"""The replica as a process: it listens at once, loads its model beside that, serves, and leaves the fleet in order.

    listen -> load in a thread (/health 200, /ready 503) -> `ready <url>` -> serve -> signal -> drain -> leave -> exit 0

A second signal ends the drain: what still runs is told so and closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from aiohttp import web

from replica.application import ReplicaApplication
from replica.backend import Backend, BackendError, load_backend
from replica.broken_http import HEAD_LIMITS, ApiProtocol
from replica.callers import Callers
from replica.crossover import Crossover
from replica.engine import Engine
from replica.membership import Identity, Membership, identify
from replica.metrics import ReplicaMetrics
from replica.prefix_cache import PrefixCache
from replica.scheduler import Scheduler
from replica.service import Deliver, ServedModel, Service
from replica.session_store import SessionStore
from replica.sessions import SessionModel, Sessions
from replica.step_meter import StepMeter
from shared.descriptors import allow_descriptors
from shared.fleet_state import FleetState
from shared.prompts import PromptEncoder, PromptError
from shared.public_prefixes import PublicPrefixes
from shared.public_prompts import PublicPrompt, PublicPromptsError, encode_public_prompts, read_public_prompts
from shared.settings import ReplicaSettings
from shared.supervisor import say_ready
from shared.telemetry import fields, set_up_logging
from shared.tokenizer_bundle import BundleError

__all__ = ["ReplicaServer", "run"]

_LAST_WORDS_SECONDS = 2.0
"""For handlers to tell their clients, when the grace time is over, that there will be no more."""
_BACKLOG = 4096
_MOST_DESCRIPTORS = 16_384
_CANNOT_START = 1
_BAD_USAGE = 2

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)
_protocol_logger = logging.getLogger(f"{__name__}.protocol")
# Broken HTTP is its sender's business, who gets a 400; and what is quoted from it may be a secret.
_protocol_logger.setLevel(logging.CRITICAL)


def run(settings: ReplicaSettings) -> int:
    """Serve until SIGINT or SIGTERM. 0: left in order; 1 or (a file of the user's) 2: why not is on stderr."""
    set_up_logging(settings.log_level, "warmroute replica", settings.log_format)
    allow_descriptors(_MOST_DESCRIPTORS)
    return uvloop.run(_serve(settings))


async def _serve(settings: ReplicaSettings) -> int:
    first, second = _signals()
    try:
        server = ReplicaServer(settings)
        await server.listen()
    except PublicPromptsError as error:
        return _fail(f"--public-prefixes {error}", _BAD_USAGE)
    except OSError as error:
        reason = error.strerror or str(error)
        return _fail(f"cannot listen on {settings.host} port {settings.port} ({reason}); choose another --port")
    try:
        loading = asyncio.ensure_future(server.load())
        await _first_of(loading, first)
        if loading.done():
            loading.result()
            say_ready(server.url)
            await first.wait()
            _logger.info("draining", extra=fields(grace_seconds=settings.grace_seconds))
        else:
            loading.cancel()
    except BackendError as error:
        return _fail(str(error))
    except PublicPromptsError as error:
        return _fail(f"--public-prefixes {error}", _BAD_USAGE)
    finally:
        await server.stop(settings.grace_seconds, second)
    return 0


@dataclass(frozen=True, slots=True)
class _Loaded:
    backend: Backend
    encoder: PromptEncoder
    identity: Identity
    sessions: SessionStore | None
    prefixes: PublicPrefixes


class ReplicaServer:
    """`listen`, `load`, `stop`, in this order; `url` is where routers reach it, known once it listens."""

    def __init__(self, settings: ReplicaSettings) -> None:
        """Raises PublicPromptsError."""
        self._settings = settings
        self._public = read_public_prompts(Path(settings.public_prefixes)) if settings.public_prefixes else []
        self._metrics = ReplicaMetrics()
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None
        self._application: ReplicaApplication | None = None
        self._membership: Membership | None = None
        self._sessions: Sessions | None = None
        self.id = ""
        self.url = ""
        self.service: Service | None = None
        """None until `load` is done."""

    async def listen(self) -> None:
        """Raises OSError where the address cannot be had."""
        settings = self._settings
        listener = _bind(settings.host, settings.port)
        self.url = settings.url or _url_of(settings.host, listener)
        self.id = settings.id or self.url.partition("://")[2].replace(":", "-")
        self._application = ReplicaApplication(
            self.id,
            version("warmroute"),
            self._metrics,
            settings.max_body_bytes,
            settings.admin_key,
            Callers(settings.replica_key, settings.secret, settings.admin_key),
        )
        self._runner = web.AppRunner(
            self._application.build(),
            handler_cancellation=True,
            shutdown_timeout=_LAST_WORDS_SECONDS,
        )
        await self._runner.setup()
        loop, server = asyncio.get_running_loop(), self._runner.server
        assert server is not None, "it has been set up"
        settings_of_each: dict[str, Any] = {"access_log": None, "logger": _protocol_logger, **HEAD_LIMITS}
        self._listening = await loop.create_server(
            lambda: ApiProtocol(server, loop=loop, **settings_of_each), sock=listener, backlog=_BACKLOG
        )

    async def load(self) -> None:
        """Raises BackendError and PublicPromptsError."""
        assert self._application is not None, "listen() comes first"
        settings = self._settings
        loaded = await _in_thread(partial(_load, settings, self.id, self.url, self._public))
        fleet_state = FleetState(settings.redis, settings.cluster, settings.secret) if settings.redis else None
        self._membership = Membership(loaded.identity, loaded.backend, fleet_state, settings.token_budget)
        model = _served_model(settings, loaded)
        start_engine = partial(_start_engine, settings, loaded.backend, model, self._membership)
        self.service = Service(model, start_engine, self._metrics, loaded.prefixes, settings.seed)
        self._metrics.watch(self.service.engine.state, loaded.backend.runner.num_blocks)
        self._membership.join(self.service)
        if loaded.sessions is not None:
            self._sessions = Sessions(loaded.sessions, self.service.engine, _session_model(loaded))
        self._application.service, self._application.sessions = self.service, self._sessions
        _logger.info(
            "serving",
            extra=fields(id=self.id, url=self.url, model=model.name, blocks=loaded.backend.runner.num_blocks),
        )
        if fleet_state is None:
            _logger.info("no --redis: publishes nothing, and is found by routers that name it with --replica URL")

    async def stop(self, grace_seconds: float, hurry: asyncio.Event | None = None) -> None:
        """Take no more requests, let those that run end within the grace (or until `hurry`), leave the fleet."""
        assert self._runner is not None, "listen() comes first"
        try:
            if self.service is not None and self._membership is not None:
                self.service.start_draining()
                self._membership.announce_soon()
                await self.service.drained(grace_seconds, hurry)
                await self._membership.leave()
        finally:
            if self._sessions is not None:
                await self._sessions.close()
            if self._listening is not None:
                self._listening.close()
            await self._runner.cleanup()
            if self.service is not None:
                await _in_thread(self.service.engine.stop)


def _load(settings: ReplicaSettings, replica_id: str, url: str, public: list[PublicPrompt]) -> _Loaded:
    backend = load_backend(settings)
    try:
        encoder = PromptEncoder(backend.bundle)
        identity = identify(replica_id, url, settings.model, backend, encoder, settings.secret)
    except (BundleError, PromptError) as error:
        raise BackendError(f"model {settings.model}: its tokenizer or chat template cannot be used: {error}") from error
    token_ids = encode_public_prompts(public, encoder)
    prefixes = PublicPrefixes(identity.fingerprint, backend.runner.block_size, settings.secret, token_ids)
    return _Loaded(backend, encoder, identity, _session_store(settings), prefixes)


def _session_store(settings: ReplicaSettings) -> SessionStore | None:
    if settings.sessions is None:
        return None
    try:
        return SessionStore(Path(settings.sessions), settings.sessions_bytes, settings.secret)
    except OSError as error:
        reason = error.strerror or error
        raise BackendError(f"--sessions {settings.sessions}: the folder cannot be used ({reason})") from error


def _session_model(loaded: _Loaded) -> SessionModel:
    backend = loaded.backend
    return SessionModel(
        weights=backend.weights_id,
        tokenizer=backend.bundle.digest,
        template=backend.bundle.template_digest,
        layout=backend.runner.kv_layout,
        prefixes=loaded.prefixes,
    )


def _served_model(settings: ReplicaSettings, loaded: _Loaded) -> ServedModel:
    runner = loaded.backend.runner
    limits = [loaded.backend.context_tokens, settings.max_model_len, runner.num_blocks * runner.block_size]
    return ServedModel(
        name=settings.model,
        fingerprint=loaded.identity.fingerprint,
        encoder=loaded.encoder,
        block_size=runner.block_size,
        context_tokens=min(limit for limit in limits if limit is not None),
        eos_token_ids=loaded.backend.eos_token_ids,
    )


def _start_engine(
    settings: ReplicaSettings, backend: Backend, model: ServedModel, membership: Membership, deliver: Deliver
) -> Engine:
    runner, meter = backend.runner, StepMeter()
    crossover = Crossover(runner.block_size, lambda: meter.coefficients() or backend.cost)
    cache = PrefixCache(
        runner.num_blocks,
        runner.block_size,
        finer=not settings.whole_blocks,
        host_blocks=runner.host_blocks,
        worth_onloading=crossover.worth_onloading,
        retained_share=settings.retained_share,
    )
    scheduler = Scheduler(
        cache,
        settings.token_budget,
        settings.max_running,
        settings.max_waiting,
        context_tokens=model.context_tokens,
        eos_token_ids=model.eos_token_ids,
    )
    return Engine(
        runner,
        scheduler,
        deliver=deliver,
        on_cache_events=membership.offer,
        crossover=crossover,
        meter=meter,
    )


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)  # two sockets may bind one port; only one may listen
    except OSError:
        listener.close()
        raise
    return listener


def _url_of(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    if host in ("", "0.0.0.0", "::"):  # noqa: S104 - every address is none to be reached at
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first and by the second SIGINT or SIGTERM."""
    first, second = asyncio.Event(), asyncio.Event()

    def note() -> None:
        (second if first.is_set() else first).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, note)
    return first, second


async def _first_of(loading: asyncio.Future[None], stopping: asyncio.Event) -> None:
    waiting = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((loading, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def _in_thread(work: Callable[[], _T]) -> _T:
    """In a daemon thread, which unlike an executor's does not keep the process from ending while a model loads."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def job() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=job, name="loader", daemon=True).start()
    return await future


def _fail(message: str, status: int = _CANNOT_START) -> int:
    sys.stderr.write(f"warmroute replica: {message}\n")
    return status
