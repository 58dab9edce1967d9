"""Redis, replicas and a router on this machine, as children of one process: what `warmroute up` runs.

find or start Redis  ->  replicas, all at once  ->  router  ->  every replica known to it  ->  `ready <url>`
a child dies         ->  it is started again, later and later if it keeps dying
SIGINT, SIGTERM      ->  router drains, replicas drain, Redis goes; a second signal ends them at once
"""

from __future__ import annotations

import errno
import http
import http.client
import json
import logging
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import redis

from shared.embedded_redis import EmbeddedRedisError, find_or_start, start
from shared.settings import UpSettings
from shared.supervisor import Child, ChildFailedError, Program, say_ready, stop_all
from shared.telemetry import fields, set_up_logging

__all__ = [
    "Interrupted",
    "LocalCluster",
    "port_is_free",
    "replica_program",
    "router_program",
    "run",
    "threads_per_replica",
]

_LAST_WORDS_SECONDS = 3.0
"""After the grace time, for a child to tell its clients and end; what still runs then is killed."""
_POLL_SECONDS = 0.05
_WATCH_SECONDS = 0.2
_HTTP_SECONDS = 2.0
_FIRST_BACKOFF_SECONDS = 0.5
_MAX_BACKOFF_SECONDS = 30.0
_REDIS_PAUSE_SECONDS = 2.0
_HEALTHY_SECONDS = 60.0
"""A child that ran this long has earned a quick restart."""

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is this machine we speak to
_logger = logging.getLogger(__name__)


def threads_per_replica(replicas: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // replicas)


def replica_program(settings: UpSettings, number: int, redis_url: str) -> Program:
    """Listens on a free port of the loopback, and says which."""
    name = f"replica-{number}"
    threads = settings.threads or threads_per_replica(settings.replicas)
    flags: dict[str, str | float] = {
        "host": "127.0.0.1",
        "port": 0,
        "id": name,
        "cluster": settings.cluster,
        "engine": settings.engine,
        "model": settings.model,
        "block-size": settings.block_size,
        "host-blocks": settings.host_blocks,
        "token-budget": settings.token_budget,
        "threads": threads,
        "grace-seconds": settings.grace_seconds,
        "log-level": settings.log_level,
    }
    if settings.blocks is not None:
        flags["blocks"] = settings.blocks
    # Torch and BLAS read these at import, before anybody can tell them otherwise.
    environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return Program(name, ("replica", *_as_flags(flags)), environment | _shared_environment(settings, redis_url))


def router_program(settings: UpSettings, redis_url: str) -> Program:
    flags: dict[str, str | float] = {
        "host": settings.host,
        "port": settings.port,
        "cluster": settings.cluster,
        "policy": settings.policy,
        "grace-seconds": settings.grace_seconds,
        "log-level": settings.log_level,
    }
    if settings.decision_log is not None:
        flags["decision-log"] = settings.decision_log
    return Program("router", ("router", *_as_flags(flags)), _shared_environment(settings, redis_url))


def _as_flags(flags: dict[str, str | float]) -> Iterator[str]:
    return (f"--{name}={value}" for name, value in flags.items())


def _shared_environment(settings: UpSettings, redis_url: str) -> dict[str, str]:
    # Not as flags: both may hold a password. An empty secret takes away the one that we may have inherited.
    return {"WARMROUTE_REDIS": redis_url, "WARMROUTE_SECRET": settings.secret}


@dataclass(slots=True)
class _Place:
    """One program of the cluster, and the process that runs it now."""

    program: Program
    child: Child
    restarts: int = 0
    restart_at_seconds: float | None = None


class LocalCluster:
    """Belongs to one thread. After `stop` nothing is left, at whatever point it is called."""

    def __init__(self, settings: UpSettings, redis_url: str, interrupted: Callable[[], bool] = lambda: False) -> None:
        self._settings = settings
        self._redis_url = redis_url
        self._interrupted = interrupted
        self._replicas: list[_Place] = []
        self._routers: list[_Place] = []

    @property
    def children(self) -> list[Child]:
        return [place.child for place in (*self._routers, *self._replicas)]

    def start(self) -> str:
        """The router's URL, once it serves and knows every replica. Raises ChildFailedError, or Interrupted."""
        settings = self._settings
        deadline = time.monotonic() + settings.ready_timeout_seconds
        for number in range(1, settings.replicas + 1):
            self._replicas.append(_placed(replica_program(settings, number, self._redis_url)))
        router = _placed(router_program(settings, self._redis_url))
        self._routers.append(router)
        for child in self.children:
            self._wait_for(child, deadline, lambda: child.url is not None)  # noqa: B023 - called at once
        for place in self._replicas:
            self._wait_for(place.child, deadline, lambda: _answers(f"{place.child.url}/ready"))  # noqa: B023
        url = router.child.wait_ready(0)
        self._wait_for(router.child, deadline, lambda: _answers(f"{url}/ready") and _knows(url, settings.replicas))
        # Started again, it must be found where it was, even if its port was ours to choose.
        router.program = router_program(replace(settings, port=urlsplit(url).port or settings.port), self._redis_url)
        return url

    def watch(self, revive_redis: Callable[[], None] = lambda: None) -> None:
        """Starts children again that die, until interrupted."""
        while not self._interrupted():
            revive_redis()
            for place in (*self._routers, *self._replicas):
                _revive(place)
            time.sleep(_WATCH_SECONDS)

    def stop(self) -> None:
        """In order: the router first, so that no request meets a replica that is gone. Bounded in time."""
        try:
            for places in (self._routers, self._replicas):
                stop_all([place.child for place in places], self._settings.grace_seconds + _LAST_WORDS_SECONDS)
        finally:
            for child in self.children:
                child.close()

    def _wait_for(self, child: Child, deadline: float, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._interrupted():
                raise Interrupted
            if child.exit_code is not None:
                raise ChildFailedError(f"{child.program.name} did not start: {child.last_words()}")
            if time.monotonic() > deadline:
                seconds = self._settings.ready_timeout_seconds
                raise ChildFailedError(f"{child.program.name} was not ready within {seconds:g} s; see its log above")
            time.sleep(_POLL_SECONDS)


class _Redis:
    """The one at `url`, or one of our own. Ours is started again where it was; replicas publish anew."""

    def __init__(self, url: str | None) -> None:
        """Raises EmbeddedRedisError."""
        self._running = ExitStack()
        self._server = self._running.enter_context(find_or_start(url))
        self._not_before_seconds = 0.0
        self.url = self._server.url

    def revive(self) -> None:
        if not self._server.ended or time.monotonic() < self._not_before_seconds:
            return
        _logger.warning("Redis ended and is started again")
        self._running.close()
        try:
            self._server = self._running.enter_context(start(urlsplit(self.url).port))
        except EmbeddedRedisError as error:
            self._not_before_seconds = time.monotonic() + _REDIS_PAUSE_SECONDS
            _logger.warning("it is tried again later", extra=fields(reason=str(error)))

    def close(self) -> None:
        self._running.close()


class Interrupted(Exception):  # noqa: N818
    """The user asked to stop before all was started."""


def run(settings: UpSettings) -> int:
    """`warmroute up`: returns the exit code."""
    set_up_logging(settings.log_level, "warmroute up")
    with _signals() as interrupted:
        try:
            _check_port(settings.host, settings.port)
            with closing(_Redis(settings.redis)) as redis_server:
                _check_redis(redis_server.url)
                cluster = LocalCluster(settings, redis_server.url, interrupted)
                try:
                    say_ready(cluster.start())
                    cluster.watch(redis_server.revive)
                finally:
                    cluster.stop()
        except Interrupted:
            pass
        except (ChildFailedError, EmbeddedRedisError, _CannotStartError) as error:
            sys.stderr.write(f"warmroute up: {error}\n")
            return 1
        except KeyboardInterrupt:
            return 130
    return 0


class _CannotStartError(Exception):
    pass


@contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """The first signal is noted, for an orderly end; the second cuts that short."""
    received = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received == 2:
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield lambda: received > 0
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _placed(program: Program) -> _Place:
    return _Place(program, Child(program))


def _revive(place: _Place) -> None:
    now = time.monotonic()
    child = place.child
    if child.exit_code is None:
        return
    if place.restart_at_seconds is None:
        if now - child.started_seconds > _HEALTHY_SECONDS:
            place.restarts = 0
        backoff = min(_MAX_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2**place.restarts)
        _logger.warning(
            "a child ended and is started again",
            extra=fields(
                child=place.program.name,
                exit_code=child.exit_code,
                last_words=child.last_words(),
                in_seconds=backoff,
            ),
        )
        child.close()
        place.restart_at_seconds = now + backoff
    elif now >= place.restart_at_seconds:
        place.child = Child(place.program)
        place.restarts += 1
        place.restart_at_seconds = None


def _check_port(host: str, port: int) -> None:
    if port and not port_is_free(host, port):
        raise _CannotStartError(f"port {port} of {host} is taken; choose another with --port")


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. True also where the host is unknown: that is another complaint."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror:
            return True
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def _check_redis(url: str) -> None:
    patience = {"socket_timeout": _HTTP_SECONDS, "socket_connect_timeout": _HTTP_SECONDS}
    try:
        # The client would introduce itself unasked, and swallow the words of a Redis that refuses the connection.
        with redis.Redis.from_url(url, driver_info=None, **patience) as client:
            client.ping()
    except (redis.ResponseError, redis.AuthenticationError) as error:
        raise _CannotStartError(f"the Redis that --redis or REDIS_URL names refuses: {error}") from error
    except (redis.RedisError, OSError, ValueError) as error:
        reason = f"the Redis that --redis or REDIS_URL names does not answer ({type(error).__name__})"
        raise _CannotStartError(f"{reason}; start it, or leave both out and one is started for you") from error


def _answers(url: str) -> bool:
    try:
        with _opener.open(url, timeout=_HTTP_SECONDS) as response:
            status: int = response.status
            return status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False


def _knows(router_url: str, replicas: int) -> bool:
    try:
        with _opener.open(router_url + "/replicas", timeout=_HTTP_SECONDS) as response:
            listed: list[dict[str, Any]] = json.load(response)["replicas"]
    except urllib.error.HTTPError as error:
        forbidden: bool = error.code in (401, 403)
        return forbidden  # not for us to see: /ready has to do
    except (OSError, http.client.HTTPException, ValueError):
        return False
    return len([replica for replica in listed if replica["state"] == "accepting"]) >= replicas
