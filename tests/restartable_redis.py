"""A real Redis that a test can take away and bring back, empty, on the same port."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import redis

from shared.embedded_redis import RedisServer, start

__all__ = ["RestartableRedis", "restartable_redis"]


class RestartableRedis:
    def __init__(self) -> None:
        self._stack = ExitStack()
        self._server: RedisServer = self._stack.enter_context(start())
        self.url = self._server.url
        self.client: Any = redis.Redis.from_url(self.url)

    def kill(self) -> None:
        self._server.kill()
        self._stack.close()

    def restart(self) -> None:
        self._server = self._stack.enter_context(start(int(self.url.rsplit(":", 1)[1].split("/")[0])))

    def freeze(self) -> None:
        """It accepts connections and answers nothing, as a machine that swaps itself to death."""
        assert self._server.pid is not None
        os.kill(self._server.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._server.pid is not None
        os.kill(self._server.pid, signal.SIGCONT)

    def close(self) -> None:
        self.client.close()
        self._stack.close()


@contextmanager
def restartable_redis() -> Iterator[RestartableRedis]:
    server = RestartableRedis()
    try:
        yield server
    finally:
        server.close()
