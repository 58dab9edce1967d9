"""An engine whose steps a test can hold and break, and all that it told."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager

from replica.engine import Engine
from replica.engine_events import TokenEvent
from replica.prefix_cache import CacheEvents, PrefixCache
from replica.runner import Chunk, StepResult
from replica.scheduler import Scheduler
from replica.sequence import Sequence
from shared.blocks import BlockKey
from tests.helpers import wait_until
from tests.replica.pool_runner import PoolRunner, make_sequence

SIZE = 4


class GatedRunner(PoolRunner):
    """Runs freely until `gate` is cleared; then each step waits for it. Raises what `failures` holds, once each."""

    def __init__(self, num_blocks: int, host_blocks: int) -> None:
        super().__init__(num_blocks, SIZE, host_blocks=host_blocks)
        self.gate = threading.Event()
        self.gate.set()
        self.in_step = threading.Event()
        self.failures: list[Callable[[], BaseException]] = []

    def execute(self, chunks: Items[Chunk]) -> StepResult:
        self.in_step.set()
        assert self.gate.wait(10)
        self.in_step.clear()
        if self.failures:
            raise self.failures.pop(0)()
        return super().execute(chunks)


class Listener:
    """Everything the engine told, by request; and the published keys that follow from its cache events."""

    def __init__(self) -> None:
        self.events: dict[str, list[TokenEvent]] = defaultdict(list)
        self.deliveries: list[list[TokenEvent]] = []
        self.published: set[BlockKey] = set()
        self.on_host: set[BlockKey] = set()

    def deliver(self, events: list[TokenEvent]) -> None:
        self.deliveries.append(events)
        for event in events:
            self.events[event.request_id].append(event)

    def follow(self, events: CacheEvents) -> None:
        self.published = (self.published - set(events.removed)) | set(events.stored)
        self.on_host = (self.on_host - set(events.host_removed)) | set(events.host_stored)

    def ended(self, sequence: Sequence) -> bool:
        return any(event.finish_reason for event in self.events[sequence.request_id])

    def last(self, sequence: Sequence) -> TokenEvent:
        wait_until(lambda: self.ended(sequence), what="the end of the answer")
        return self.events[sequence.request_id][-1]

    def answer(self, sequence: Sequence) -> list[int]:
        self.last(sequence)
        return [token for event in self.events[sequence.request_id] for token in event.token_ids]


class Rig:
    def __init__(
        self,
        num_blocks: int = 64,
        token_budget: int = 32,
        max_running: int = 8,
        max_waiting: int = 1_000,
        host_blocks: int = 0,
    ) -> None:
        self.runner = GatedRunner(num_blocks, host_blocks)
        self.listener = Listener()
        cache = PrefixCache(num_blocks, SIZE, host_blocks=host_blocks)
        self.scheduler = Scheduler(cache, token_budget, max_running, max_waiting)
        self.engine = Engine(
            self.runner, self.scheduler, deliver=self.listener.deliver, on_cache_events=self.listener.follow
        )

    def submit(self, prompt: list[int], max_tokens: int = 4) -> Sequence:
        sequence = make_sequence(prompt, max_tokens)
        self.engine.submit(sequence)
        return sequence

    def hold(self) -> None:
        """Let the engine stop inside its next step."""
        self.runner.gate.clear()

    def release(self) -> None:
        self.runner.gate.set()

    def wait_until_free(self) -> None:
        capacity = self.scheduler.cache.num_blocks
        wait_until(
            lambda: (
                (load := self.engine.load()).running + load.waiting == 0
                and load.free_blocks + load.evictable_blocks == capacity
            ),
            what="an empty engine",
        )


@contextmanager
def rig(num_blocks: int = 64, **limits: int) -> Iterator[Rig]:
    made = Rig(num_blocks, **limits)
    try:
        yield made
        made.release()
        made.engine.stop(10)
        assert not made.engine.alive
        if not made.runner.failures:
            made.scheduler.check_integrity()
        assert made.listener.published == set(made.scheduler.cache.held_keys())
    finally:
        made.release()
        made.engine.stop(10)
