"""One call to Redis: what its failures mean, and to whom they are told."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError

__all__ = ["FleetStateMistyped", "FleetStateUnavailable", "MistypedKeys", "answered", "execute", "unavailable"]

_WRONG_TYPE = "WRONGTYPE"
_AGAIN_SECONDS = 60.0
_MOST_KEYS = 64

_logger = logging.getLogger(__name__)


class FleetStateUnavailable(Exception):  # noqa: N818 - it is a state of the world, not a mistake
    """Redis does not answer, or refuses. The message names the cause."""


class FleetStateMistyped(FleetStateUnavailable):
    """Redis does answer, but somebody put a value of another type under one of our keys: whose it is writes it anew."""


class MistypedKeys:
    """Keys that all share, and somebody else wrote to: nobody writes them anew, so whoever runs the cluster is told."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_at: dict[str, float] = {}

    def tell(self, key: str) -> None:
        """One line a minute for each key."""
        now = self._clock()
        if now - self._told_at.get(key, float("-inf")) < _AGAIN_SECONDS:
            return
        if len(self._told_at) >= _MOST_KEYS:
            self._told_at.clear()
        self._told_at[key] = now
        _logger.error("the Redis key %r is not of its type: somebody else wrote it. Serving on without it; DEL it", key)

    @contextmanager
    def told(self, key: str) -> Iterator[None]:
        """Calls about one such key."""
        try:
            with unavailable():
                yield
        except FleetStateMistyped:
            self.tell(key)
            raise


@contextmanager
def unavailable() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        refusal = FleetStateMistyped if _WRONG_TYPE in str(error) else FleetStateUnavailable
        raise refusal(str(error) or type(error).__name__) from error


async def execute(pipe: Pipeline, may_be_mistyped: int | None = None) -> list[Any]:
    """The results. The one at the given place may be the error that a key is of another type."""
    results = await pipe.execute(raise_on_error=False)
    for place, result in enumerate(results):
        # Raised by us: the client would spell out the whole command, keys and all.
        if isinstance(result, RedisError) and not (place == may_be_mistyped and _WRONG_TYPE in str(result)):
            raise result
    return results


async def answered(reply: Awaitable[Any] | Any) -> Any:
    """The client's types say that a reply may be one or a promise of one; here it is always the promise."""
    return await reply
