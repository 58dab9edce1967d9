"""The cluster that a soak breaks: Redis, three replicas with the simulated engine, a router; and what they log."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

from shared.embedded_redis import RedisServer, start
from shared.supervisor import Child, Program

__all__ = ["REPLICAS", "SoakCluster"]

REPLICAS = ("r1", "r2", "r3")
_READY_SECONDS = 60.0


class SoakCluster:
    """Starts on entering. Blocking calls: not for an event loop's own thread."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._redis_stack = ExitStack()
        self._redis: RedisServer
        self.replicas: dict[str, Child] = {}
        self.router: Child
        self.url = ""

    def __enter__(self) -> SoakCluster:
        with self._stack:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-soak-")))
            self._log_path = folder / "log"
            self._log = self._stack.enter_context(self._log_path.open("w"))
            self._stack.enter_context(self._redis_stack)
            self._redis = self._redis_stack.enter_context(start())
            self.replicas = {name: self._replica(name) for name in REPLICAS}
            self.router = self._child("router", "router", "--policy", "cache-aware")
            for child in (*self.replicas.values(), self.router):
                child.wait_ready(_READY_SECONDS)
            self.url = self.router.wait_ready(0)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stack.close()

    def logged(self) -> list[str]:
        """All that the programs had to say: they are asked for errors only."""
        return self._log_path.read_text().splitlines()

    def kill_replica(self, name: str) -> None:
        """It comes back as another process under the same name."""
        self.replicas[name].close()
        self.replicas[name] = self._replica(name)
        self.replicas[name].wait_ready(_READY_SECONDS)

    def freeze_replica(self, name: str, seconds: float) -> None:
        _freeze(self.replicas[name].pid, seconds)

    def stop_replica(self, name: str) -> None:
        """As `kill_replica`, but asked to: it ends what it has begun."""
        self.replicas[name].terminate()
        self.replicas[name].wait(_READY_SECONDS)
        self.kill_replica(name)

    def kill_redis(self) -> None:
        """It comes back empty."""
        port = urlsplit(self._redis.url).port
        self._redis.kill()
        self._redis_stack.close()
        self._redis = self._redis_stack.enter_context(start(port))

    def freeze_redis(self, seconds: float) -> None:
        assert self._redis.pid is not None
        _freeze(self._redis.pid, seconds)

    def _replica(self, name: str) -> Child:
        flags = ("--engine", "sim", "--id", name, "--blocks", "2048", "--sim-base-seconds", "0.005")
        return self._child(name, "replica", *flags)

    def _child(self, name: str, command: str, *flags: str) -> Child:
        common = ("--port", "0", "--redis", self._redis.url, "--log-level", "error")
        child = Child(Program(name, (command, *common, *flags), {"WARMROUTE_SECRET": ""}), self._log)
        self._stack.callback(child.close)
        return child


def _freeze(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
