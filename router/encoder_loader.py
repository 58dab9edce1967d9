"""Fetches the tokenizers that replicas name, and builds encoders from them, in the background and off the loop.

At most one attempt per digest at a time; one that fails is made again after a while, and said once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from router.fleet import Fleet
from shared.fleet_state import FleetState, FleetStateUnavailable
from shared.prompts import PromptEncoder
from shared.tokenizer_bundle import BundleError, TokenizerBundle

__all__ = ["EncoderLoader"]

_RETRY_SECONDS = 2.0

_logger = logging.getLogger(__name__)


class EncoderLoader:
    """`on_loaded` is called after an encoder has been put into the fleet."""

    def __init__(
        self,
        fleet_state: FleetState,
        fleet: Fleet,
        on_loaded: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet_state = fleet_state
        self._fleet = fleet
        self._on_loaded = on_loaded
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._retry_at: dict[str, float] = {}

    def want(self, digest: str) -> None:
        """See to it that the fleet has this encoder, sooner or later. Cheap to repeat."""
        if self._fleet.encoder(digest) is None and digest not in self._tasks:
            if self._clock() < self._retry_at.get(digest, 0.0):
                return
            task = asyncio.get_running_loop().create_task(self._load(digest), name=f"tokenizer {digest}")
            self._tasks[digest] = task
            task.add_done_callback(lambda _: self._tasks.pop(digest, None))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, digest: str) -> None:
        try:
            packed = await self._fleet_state.get_tokenizer(digest)
            if packed is None:
                raise BundleError("it is not in Redis yet")
            encoder = await asyncio.to_thread(_build, digest, packed)
        except (BundleError, FleetStateUnavailable) as error:
            if digest not in self._retry_at:
                _logger.warning("tokenizer %s cannot be used, prompts are routed without: %s", digest, error)
            self._retry_at[digest] = self._clock() + _RETRY_SECONDS
            return
        self._retry_at.pop(digest, None)
        self._fleet.set_encoder(digest, encoder)
        _logger.info("tokenizer %s loaded", digest)
        self._on_loaded()


def _build(digest: str, packed: bytes) -> PromptEncoder:
    bundle = TokenizerBundle.unpack(packed)
    if bundle.digest != digest:
        raise BundleError(f"its content has the digest {bundle.digest}")
    return PromptEncoder(bundle)
