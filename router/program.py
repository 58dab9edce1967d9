"""`warmroute router`: one router, or the parent of several, as a program with signals and an exit status."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack

from router.api_keys import ApiKeysError
from router.app import Router
from router.decision_log import DecisionLogError
from router.otel import tracer_from
from router.policies import UnknownPolicyError
from router.siblings import Siblings
from router.tls import TlsError
from router.tracing import trace_of
from router.workers import CannotShareError, Workers
from shared.descriptors import allow_descriptors
from shared.public_prompts import PublicPromptsError
from shared.settings import RouterSettings
from shared.supervisor import say_ready
from shared.telemetry import fields, set_up_logging

__all__ = ["run", "serve"]

_BAD_USAGE = 2
_CANNOT_START = 1
_COLLECTOR_THRESHOLDS = (5_000, 20, 20)

_logger = logging.getLogger(__name__)


def run(settings: RouterSettings) -> int:
    """Serve until SIGTERM or SIGINT; a second one ends what is in flight at once. Returns the exit status."""
    if settings.workers == 1:
        return serve(settings)
    set_up_logging(settings.log_level, "router", settings.log_format)
    if settings.redis is None:
        _logger.warning("no Redis: each worker knows its own work alone")

    async def run_workers() -> int:
        Router(settings)  # what cannot be used is to be told once, not by each of them
        return await Workers(settings).run()

    try:
        return _explained(settings, run_workers, asyncio.Runner())
    except CannotShareError as error:
        sys.stderr.write(f"warmroute router: {error}\n")
        return _BAD_USAGE


def serve(settings: RouterSettings, siblings: Siblings | None = None) -> int:
    """The same in this process alone; `siblings` where it is one of several workers."""
    set_up_logging(settings.log_level, "router", settings.log_format)
    # One for each client, one to the replica that answers it.
    if (allowed := allow_descriptors(2 * settings.max_connections)) < settings.max_connections:
        _logger.warning(
            "the system allows fewer open files than --max-connections: raise its limit (ulimit -Hn)",
            extra=fields(allowed=allowed, max_connections=settings.max_connections),
        )
    return _explained(settings, lambda: _serve(settings, siblings), asyncio.Runner(loop_factory=_loop_factory()))


def _explained(
    settings: RouterSettings, program: Callable[[], Coroutine[None, None, int]], runner: asyncio.Runner
) -> int:
    """The exit status; one line says why where it cannot start."""
    try:
        with runner:
            return runner.run(program())
    except PublicPromptsError as error:
        sys.stderr.write(f"warmroute router: --public-prefixes {error}\n")
        return _BAD_USAGE
    except (ApiKeysError, DecisionLogError, TlsError, UnknownPolicyError) as error:
        sys.stderr.write(f"warmroute router: {error}\n")
        return _BAD_USAGE
    except OSError as error:
        advice = "choose another --port" if error.errno == errno.EADDRINUSE else "choose another --host or --port"
        reason = error.strerror or str(error)
        sys.stderr.write(f"warmroute router: cannot listen on {settings.host}:{settings.port} ({reason}); {advice}\n")
        return _CANNOT_START


def _spare_the_collector() -> None:
    """What starting has left stays for good: to go through it again and again would hold the loop for milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)


async def _serve(settings: RouterSettings, siblings: Siblings | None) -> int:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    tracer = tracer_from(os.environ)
    async with AsyncExitStack() as stack:
        if tracer is not None:
            stack.callback(tracer.close)
        begin_trace = tracer.begin if tracer is not None else trace_of
        router = await stack.enter_async_context(Router(settings, siblings, begin_trace))
        if settings.redis is None and not settings.replica:
            _logger.warning("no Redis and no --replica: there is nobody to route to")
        loop.add_signal_handler(signal.SIGHUP, router.reload)
        _spare_the_collector()
        say_ready(router.url)
        await stop.wait()
        await router.drain(hurry)
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    return uvloop.new_event_loop
