from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from replica.engine import EngineFull, EngineStopped, PromptTooLong
from replica.sequence import FinishReason
from tests.helpers import wait_until
from tests.replica.engine_rig import SIZE, Rig, rig
from tests.replica.pool_runner import answer_to


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
