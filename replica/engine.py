"""One thread that steps the scheduler and the runner. Everyone else talks to it through an inbox.

    any thread     submit, abort, reset_prefix_cache, describe, stop  --> inbox
    engine thread  [ drain the inbox ] -> schedule -> execute -> commit -> deliver, on_cache_events -> [ drain ...
                     sleeps here when there is nothing to do

So the cache and the scheduler need no locks, and an abort takes effect before the next step. Every submitted sequence
gets exactly one event with a finish reason, whatever happens. A step that fails ends its own sequences with an error;
the engine goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Concatenate, ParamSpec, TypeVar

from replica.block_moves import carry_out
from replica.block_pool import IntegrityError
from replica.cache_events import CacheEvents
from replica.cache_view import CacheDescription, describe
from replica.crossover import Crossover
from replica.engine_events import EngineState, TokenEvent, event_of
from replica.guests import Guests
from replica.prefix_cache import ResetResult
from replica.runner import Chunk, Runner, RunnerError
from replica.scheduler import EngineFull, InvalidPrompt, Progress, PromptTooLong, Scheduler
from replica.sequence import FinishReason, Sequence
from replica.step_meter import StepMeter
from shared.fleet_records import ReplicaLoad

__all__ = [
    "CacheDescription",
    "Engine",
    "EngineFull",
    "EngineState",
    "EngineStopped",
    "InvalidPrompt",
    "PromptTooLong",
    "TokenEvent",
]

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_UNEXPECTED = "the engine failed unexpectedly; its log says more"

_QUIET_SECONDS = 0.2
"""Idle for that long, the engine has time to check itself."""
_CHECK_SHARE = 0.01
"""At most this share of the time goes into idle integrity checks."""


class _BlocksLostError(Exception):
    """The KV pool is not what the prefix cache says."""


class EngineStopped(Exception):  # noqa: N818 - a state, not a mistake
    """The engine is shutting down, or has."""


class Engine:
    """Starts its thread at once. `deliver` and `on_cache_events` are called by it and must return quickly."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        deliver: Callable[[list[TokenEvent]], None],
        on_cache_events: Callable[[CacheEvents], None],
        crossover: Crossover | None = None,
        meter: StepMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._deliver = deliver
        self._on_cache_events = on_cache_events
        self._crossover = crossover
        self._clock = clock
        self._meter = meter or StepMeter()
        self._guests = Guests(runner, scheduler, self._move_blocks_now)
        self._stalled = False
        self._steps = self._failed_steps = 0
        self._next_check_seconds = 0.0
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Guards the two below and the order of puts: whatever is put before the last command is still answered.
        self._door = threading.Lock()
        self._live: dict[str, Sequence] = {}
        self._closed = False
        self._stopping = False
        self._events: list[TokenEvent] = []
        self._state = self._look()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -- any thread ------------------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """Raises InvalidPrompt, EngineFull or EngineStopped at once; later errors come as events."""
        self._scheduler.check_fits(sequence)
        limit = self._scheduler.max_sequences
        with self._door:
            self._refuse_if_closed()
            if sequence.request_id in self._live:
                raise ValueError(f"request {sequence.request_id} is already here")
            if len(self._live) >= limit:
                raise EngineFull(f"{limit} requests are running or waiting, which is the limit: try again later")
            self._live[sequence.request_id] = sequence
            self._inbox.put(partial(self._scheduler.add, sequence))

    def abort(self, request_id: str) -> None:
        """Takes effect before the next step; unknown and finished ids are fine."""
        self._inbox.put(partial(self._abort, request_id))

    def reset_prefix_cache(self) -> Future[ResetResult]:
        """Forget all blocks that no running sequence uses."""
        return self._ask(self._scheduler.cache.reset)

    def describe(self, most_nodes: int = 0, *, with_tokens: bool = False) -> Future[CacheDescription]:
        """With up to that many nodes of the tree of what is held, and the first tokens of each."""
        scheduler = self._scheduler
        return self._ask(partial(describe, scheduler.cache, scheduler.counters, most_nodes, with_tokens))

    def visit(
        self, question: Callable[Concatenate[Guests, _P], _T], *arguments: _P.args, **named: _P.kwargs
    ) -> Future[_T]:
        """Between two steps: `engine.visit(Guests.read, guest, first, last)`."""
        return self._ask(partial(question, self._guests, *arguments, **named))

    def state(self) -> EngineState:
        return self._state

    def load(self) -> ReplicaLoad:
        return self._state.load

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_seconds: float | None = None) -> None:
        """Finish the step, end what is left with ABORT, join the thread. Twice is fine."""
        with self._door:
            if not self._closed:
                self._closed = True
                self._inbox.put(self._leave)
        self._thread.join(timeout_seconds)

    def _ask(self, question: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        with self._door:
            self._refuse_if_closed()
            self._inbox.put(partial(_answer, future, question))
        return future

    def _refuse_if_closed(self) -> None:
        if self._closed or not self._thread.is_alive():
            raise EngineStopped("the engine is shutting down")

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._drain_inbox()
                if self._scheduler.has_work and not self._stopping:
                    self._step()
                self._tell()
            for sequence in self._scheduler.sequences():
                self._abort(sequence.request_id)
        finally:
            # Even if this thread broke, nobody is left waiting for an answer.
            with self._door:
                self._closed = True
            for sequence in list(self._live.values()):
                self._end(sequence, FinishReason.ERROR, _UNEXPECTED)
            self._tell()

    def _drain_inbox(self) -> None:
        """Carry out all commands that are there; wait for one if there is nothing else to do."""
        if (self._stalled or not self._scheduler.has_work) and self._inbox.empty():
            self._obey(self._await_command())
        self._stalled = False
        while not self._stopping and not self._inbox.empty():
            self._obey(self._inbox.get())

    def _await_command(self) -> Callable[[], None]:
        try:
            return self._inbox.get(timeout=_QUIET_SECONDS)
        except Empty:
            self._check_when_idle()
            self._tell()
            return self._inbox.get()

    def _obey(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception as error:
            self._fail_step(self._scheduler.sequences(), error)

    def _step(self) -> None:
        chunks: list[Chunk] = []
        try:
            chunks = self._scheduler.schedule()
            refused = self._scheduler.take_refused()
            for sequence in refused:
                self._end(sequence, FinishReason.COLD)
            if not chunks and (refused or self._scheduler.guests):
                self._stalled = not refused  # until a guest leaves
                return
            assert chunks, "there is work, but none can be done"
            self._state = self._look()  # a step may be long
            self._move_blocks()
            result = self._runner.execute(chunks)
            progress = self._scheduler.commit(chunks, result)
        except _BlocksLostError as error:
            self._failed_steps += 1
            self._start_over(error)
            return
        except Exception as error:
            self._fail_step([chunk.sequence for chunk in chunks] or self._scheduler.sequences(), error)
            return
        self._steps += 1
        self._meter.observe(chunks, result.seconds)
        for step in progress:
            self._note_progress(step)

    def _move_blocks(self) -> None:
        moves = self._scheduler.cache.take_moves()
        try:
            transferred = carry_out(self._runner, moves)
        except Exception as error:
            # Some blocks now hold something else than the cache believes, and nobody knows which.
            raise _BlocksLostError(f"blocks could not be moved ({error})") from error
        if moves and self._crossover is not None:
            self._crossover.observe(transferred)

    def _move_blocks_now(self) -> None:
        """For a guest, outside a step. It may find itself gone afterwards."""
        try:
            self._move_blocks()
        except _BlocksLostError as error:
            self._start_over(error)

    def _fail_step(self, sequences: Iterable[Sequence], error: Exception) -> None:
        self._failed_steps += 1
        if isinstance(error, RunnerError):
            logger.error("a step failed: %s", error)
            message = f"the engine could not compute this request: {error}"
        else:
            logger.error("a step failed unexpectedly", exc_info=error)
            message = _UNEXPECTED
        try:
            for sequence in sequences:
                self._scheduler.abort(sequence.request_id, FinishReason.ERROR)
                self._end(sequence, FinishReason.ERROR, message)
            self._scheduler.check_integrity()
        except Exception as broken:
            self._start_over(broken)

    def _start_over(self, broken: Exception) -> None:
        logger.critical("the prefix cache cannot be relied on and starts over empty: %s", broken)
        for sequence in self._scheduler.start_over():
            self._end(sequence, FinishReason.ERROR, _UNEXPECTED)

    def _abort(self, request_id: str) -> None:
        sequence = self._scheduler.abort(request_id)
        if sequence is not None:
            self._end(sequence, FinishReason.ABORT)

    def _note_progress(self, progress: Progress) -> None:
        sequence = progress.sequence
        if sequence.finish_reason is not None:
            self._end(sequence, sequence.finish_reason, progress=progress)
        else:
            self._events.append(event_of(sequence, progress))

    def _end(
        self, sequence: Sequence, reason: FinishReason, error: str | None = None, progress: Progress | None = None
    ) -> None:
        """The last event of a sequence; only the first call for it counts."""
        with self._door:
            if self._live.pop(sequence.request_id, None) is None:
                return
        self._runner.forget(sequence.request_id)
        self._events.append(event_of(sequence, progress, reason, error))

    def _tell(self) -> None:
        """Once per step: tokens to those who wait for them, then what the cache holds now."""
        self._state = self._look()
        events, self._events = self._events, []
        cache_events = self._scheduler.cache.take_events()
        if events:
            _notify(self._deliver, events)
        if cache_events:
            _notify(self._on_cache_events, cache_events)

    def _check_when_idle(self) -> None:
        began = self._clock()
        if began < self._next_check_seconds:
            return
        try:
            self._scheduler.check_integrity()
        except IntegrityError as broken:
            self._start_over(broken)
        ended = self._clock()
        self._next_check_seconds = ended + (ended - began) / _CHECK_SHARE

    def _look(self) -> EngineState:
        scheduler = self._scheduler
        pool = scheduler.cache.pool
        load = ReplicaLoad(
            running=scheduler.running,
            waiting=scheduler.waiting,
            queued_prefill_tokens=scheduler.queued_prefill_tokens,
            free_blocks=pool.free_blocks,
            evictable_blocks=pool.cached_blocks,
        )
        return EngineState(
            load=load,
            cost=self._meter.coefficients(),
            onload_seconds_per_token=self._crossover.onload_seconds_per_token if self._crossover is not None else None,
            counters=replace(scheduler.counters),
            evictions=dict(scheduler.cache.evictions),
            held_blocks=scheduler.cache.held_blocks,
            host_held_blocks=len(scheduler.cache.host),
            steps=self._steps,
            failed_steps=self._failed_steps,
        )

    def _leave(self) -> None:
        self._stopping = True


def _notify(listener: Callable[[_T], None], news: _T) -> None:
    try:
        listener(news)
    except Exception:
        logger.exception("a listener of the engine failed")


def _answer(future: Future[_T], question: Callable[[], _T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(question())
    except Exception as error:
        future.set_exception(error)
