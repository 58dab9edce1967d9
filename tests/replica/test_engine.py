from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from replica.engine import Engine, EngineFull, EngineStopped, PromptTooLong, TokenEvent
from replica.prefix_cache import CacheEvents, PrefixCache
from replica.runner import Chunk, RunnerError, StepResult
from replica.scheduler import Scheduler
from replica.sequence import FinishReason, Sequence
from shared.blocks import BlockKey
from tests.helpers import wait_until
from tests.replica.pool_runner import PoolRunner, answer_to, make_sequence

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


def test_answers_stream_token_by_token_and_end_with_a_reason() -> None:
    with rig() as r:
        sequence = r.submit([1, 2, 3], max_tokens=5)
        assert r.listener.answer(sequence) == answer_to([1, 2, 3], 5)
        events = r.listener.events[sequence.request_id]
        assert [event.first for event in events] == [True, False, False, False, False]
        assert [event.finish_reason for event in events] == [None] * 4 + [FinishReason.LENGTH]
        assert r.runner.forgotten == [sequence.request_id]


def test_all_tokens_of_a_step_are_delivered_at_once() -> None:
    with rig() as r:
        r.hold()
        r.submit([9])
        r.runner.in_step.wait(10)
        both = [r.submit([1], max_tokens=3), r.submit([2], max_tokens=3)]
        r.release()
        for sequence in both:
            r.listener.last(sequence)
        ids = {sequence.request_id for sequence in both}
        together = [d for d in r.listener.deliveries if ids <= {event.request_id for event in d}]
        assert len(together) == 3


def test_events_carry_the_tokens_that_the_cache_gave() -> None:
    with rig() as r:
        r.listener.last(r.submit(list(range(12))))
        assert r.listener.last(r.submit([*range(12), 50])).cached_tokens == 12


def test_what_cannot_be_taken_is_refused_at_once() -> None:
    with rig(num_blocks=4, max_running=1, max_waiting=1) as r:
        with pytest.raises(PromptTooLong, match="prompt has 20 tokens"):
            r.submit(list(range(20)))
        r.hold()
        first, second = r.submit([1]), r.submit([2])
        with pytest.raises(EngineFull, match="2 requests"):
            r.submit([3])
        with pytest.raises(ValueError, match="already here"):
            r.engine.submit(first)
        r.release()
        r.listener.last(second)
        r.listener.last(r.submit([3]))


def test_an_abort_ends_the_request_once_and_frees_its_blocks() -> None:
    with rig(max_running=1) as r:
        r.hold()
        running, waiting = r.submit(list(range(9)), max_tokens=50), r.submit([1])
        r.runner.in_step.wait(10)
        for sequence in (running, waiting, running):
            r.engine.abort(sequence.request_id)
        r.engine.abort("never seen")
        r.release()
        assert r.listener.last(running).finish_reason is FinishReason.ABORT
        assert r.listener.last(waiting).finish_reason is FinishReason.ABORT
        r.wait_until_free()
        assert sum(event.finish_reason is not None for event in r.listener.events[running.request_id]) == 1
        assert set(r.runner.forgotten) == {running.request_id, waiting.request_id}


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (lambda: RunnerError("out of memory"), "the engine could not compute this request: out of memory"),
        (lambda: ZeroDivisionError("secret"), "the engine failed unexpectedly; its log says more"),
    ],
    ids=["runner error", "unexpected"],
)
def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(
    failure: Callable[[], BaseException], message: str
) -> None:
    with rig() as r:
        r.hold()
        failing = [r.submit([1])]
        r.runner.in_step.wait(10)
        failing += [r.submit([2]), r.submit([1, 2, 3])]
        r.runner.failures += [failure, failure]
        r.release()
        ends = [r.listener.last(sequence) for sequence in failing]
        assert {(end.finish_reason, end.error) for end in ends} == {(FinishReason.ERROR, message)}
        assert r.engine.state().failed_steps == 2
        assert r.listener.answer(r.submit([1, 2, 3])) == answer_to([1, 2, 3], 4)
        r.wait_until_free()


def test_requests_that_wait_behind_a_failed_step_are_answered() -> None:
    with rig(max_running=1) as r:
        r.hold()
        failing = r.submit([1])
        r.runner.in_step.wait(10)
        spared = r.submit([3])
        r.runner.failures.append(lambda: RunnerError("once"))
        r.release()
        assert r.listener.last(failing).finish_reason is FinishReason.ERROR
        assert r.listener.answer(spared) == answer_to([3], 4)


def test_a_step_that_ruins_the_cache_starts_it_over_and_tells_the_fleet() -> None:
    with rig() as r:
        r.listener.last(r.submit(list(range(12))))
        wait_until(lambda: len(r.listener.published) == 3)

        r.engine._next_check_seconds = float("inf")  # the idle check must not be what helps

        def ruin() -> BaseException:
            r.scheduler.cache.pool.references[40] += 1
            return RuntimeError("a bug")

        r.runner.failures.append(ruin)
        assert r.listener.last(r.submit([1])).finish_reason is FinishReason.ERROR
        wait_until(lambda: not r.listener.published, what="the removal of all published keys")
        assert r.listener.answer(r.submit([5])) == answer_to([5], 4)
        r.wait_until_free()


def test_what_moves_to_host_memory_and_back_is_published_and_answered_right() -> None:
    with rig(num_blocks=8, host_blocks=32) as r:
        prompts = [list(range(first, first + 20)) for first in (0, 100, 200)]
        for prompt in prompts * 2:
            sequence = r.submit(prompt)
            assert r.listener.answer(sequence) == answer_to(prompt, 4)
        assert r.listener.last(sequence).cached_tokens == 16
        assert r.engine.state().counters.onloaded_tokens > 0
        r.wait_until_free()
        assert r.listener.on_host == {key for key, _ in r.scheduler.cache.host.items()} != set()


def test_blocks_that_could_not_be_moved_end_what_runs_and_start_the_cache_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rig(num_blocks=8, host_blocks=32) as r:
        r.listener.last(r.submit(list(range(20))))

        def fail(moves: object) -> float:
            raise RuntimeError("the bus is gone")

        with monkeypatch.context() as broken:
            broken.setattr(r.runner, "offload_blocks", fail)
            end = r.listener.last(r.submit(list(range(100, 120))))
        assert (end.finish_reason, end.error) == (
            FinishReason.ERROR,
            "the engine failed unexpectedly; its log says more",
        )
        wait_until(lambda: not r.listener.published and not r.listener.on_host, what="the removal of all keys")
        assert r.listener.answer(r.submit(list(range(20)))) == answer_to(list(range(20)), 4)
        assert r.engine.state().failed_steps == 1


def test_a_cache_found_broken_when_idle_starts_over() -> None:
    with rig() as r:
        r.listener.last(r.submit(list(range(12))))
        r.scheduler.cache.pool.references[40] += 1
        wait_until(lambda: not r.listener.published, what="the removal of all published keys")
        assert r.listener.answer(r.submit([5])) == answer_to([5], 4)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_breaks_leaves_nobody_waiting() -> None:
    with rig() as r:
        r.hold()
        sequence = r.submit([1])
        r.runner.failures.append(lambda: SystemExit(1))
        r.release()
        assert r.listener.last(sequence).finish_reason is FinishReason.ERROR
        wait_until(lambda: not r.engine.alive)
        with pytest.raises(EngineStopped):
            r.submit([2])


def test_a_listener_that_fails_loses_no_cache_events() -> None:
    with rig() as r:
        seen: list[TokenEvent] = []

        def deliver(events: list[TokenEvent]) -> None:
            seen.extend(events)
            raise RuntimeError("the loop is closed")

        r.engine._deliver = deliver
        r.submit(list(range(12)), max_tokens=1)
        wait_until(lambda: len(r.listener.published) == 3)
        assert seen[-1].finish_reason is FinishReason.LENGTH


def test_stopping_ends_what_is_left_and_takes_nothing_more() -> None:
    with rig() as r:
        r.hold()
        sequences = [r.submit([n], max_tokens=60) for n in range(20)]
        r.runner.in_step.wait(10)
        asked = r.engine.describe()
        stopper = threading.Thread(target=r.engine.stop)
        stopper.start()
        wait_until(lambda: r.engine._closed)
        r.release()
        stopper.join(10)
        assert {r.listener.last(sequence).finish_reason for sequence in sequences} == {FinishReason.ABORT}
        assert asked.result(1).capacity_blocks == 64
        for refused in (lambda: r.submit([1]), r.engine.describe, r.engine.reset_prefix_cache):
            with pytest.raises(EngineStopped):
                refused()
        assert r.scheduler.cache.pool.used_blocks == 0


def test_an_idle_engine_sleeps() -> None:
    with rig() as r:
        r.listener.last(r.submit([1]))
        assert r.engine._thread.ident is not None
        cpu = time.pthread_getcpuclockid(r.engine._thread.ident)
        before = time.clock_gettime(cpu)
        threading.Event().wait(0.5)
        assert time.clock_gettime(cpu) - before < 0.05


def test_the_cache_is_described_and_reset_between_steps() -> None:
    with rig() as r:
        sequence = r.submit(list(range(12)))
        r.listener.last(sequence)
        described = r.engine.describe().result(5)
        assert (described.block_size, described.capacity_blocks) == (SIZE, 64)
        assert described.used_blocks + described.cached_blocks + described.free_blocks == 64
        assert described.keys == [key[:8].hex() for key in sequence.keys[:3]]
        assert described.counters.prompt_tokens == 12
        assert r.engine.reset_prefix_cache().result(5).removed_blocks == 3
        assert r.engine.describe().result(5).keys == []


def test_the_load_tells_during_a_step_what_runs_waits_and_is_still_to_be_computed() -> None:
    with rig(max_running=1, token_budget=4) as r:
        r.hold()
        first, second = r.submit(list(range(9)), max_tokens=2), r.submit([1, 2])
        r.runner.in_step.wait(10)
        wait_until(lambda: r.engine.load().running == 1)
        load = r.engine.load()
        assert (load.free_blocks, load.evictable_blocks) == (61, 0)
        assert load.queued_prefill_tokens == 9 + 2 * load.waiting
        r.release()
        r.listener.last(first)
        r.listener.last(second)
        r.wait_until_free()
        assert r.engine.load().queued_prefill_tokens == 0


def test_the_cost_of_steps_is_measured() -> None:
    with rig() as r:
        for n in range(20):
            r.listener.last(r.submit(list(range(n, n + 8 + n % 5)), max_tokens=4))
        wait_until(lambda: r.engine.state().cost is not None)
        cost = r.engine.state().cost
        assert cost is not None
        assert cost.base_seconds == pytest.approx(0.001, rel=0.01)


def test_a_flood_from_many_threads_with_aborts_answers_right_and_leaves_everything_free() -> None:
    def one(r: Rig, seed: int) -> Any:
        rng = random.Random(seed)
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 30))]
        sequence = r.submit(prompt, max_tokens=8)
        if rng.random() < 0.5:
            if rng.random() < 0.5:
                wait_until(lambda: r.listener.events[sequence.request_id])
            r.engine.abort(sequence.request_id)
        answer = r.listener.answer(sequence)
        expected = answer_to(prompt, 8)
        reason = r.listener.last(sequence).finish_reason
        assert answer == (expected if reason is FinishReason.LENGTH else expected[: len(answer)])
        return reason

    with rig(num_blocks=24) as r, ThreadPoolExecutor(16) as threads:
        reasons = list(threads.map(lambda seed: one(r, seed), range(300)))
        assert set(reasons) == {FinishReason.LENGTH, FinishReason.ABORT}
        r.wait_until_free()
        assert not r.engine._live
        assert r.engine.describe().result(5).used_blocks == 0
