"""Steps, moves, listeners and threads that fail: every request is answered, and the engine goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from replica.engine import EngineStopped
from replica.engine_events import TokenEvent
from replica.runner import RunnerError
from replica.sequence import FinishReason
from tests.helpers import wait_until
from tests.replica.engine_rig import rig
from tests.replica.pool_runner import answer_to


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
