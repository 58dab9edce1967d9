"""A replica in virtual time: its own scheduler, prefix cache and cost model, stepped by events.

Most steps repeat the one before: every decode takes a token, and the prefill in front takes the rest of the budget.
Such *steady* steps change nothing that the scheduler would decide anew, and are played without it:

    decodes only        n steps at once, in closed form; an arrival cuts them short at the end of the step under way
    prefill in front    step by step, for its blocks are published as they come; the decodes catch up at the end

A step that could end a sequence, begin one, or need a block is never steady. So times, hits and evictions are those of
the plain way (`fast=False`), but for the rounding of sums; a test holds the two against each other.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import cast

from loadtest.simulator.clock import VirtualClock
from loadtest.simulator.profiles import Profile
from replica.block_moves import carry_out
from replica.crossover import Crossover
from replica.prefix_cache import CacheEvents, PrefixCache
from replica.runner import Chunk, StepResult
from replica.scheduler import Scheduler
from replica.sequence import Sequence
from replica.simulated_runner import SimulatedRunner
from shared.fleet_state import ReplicaLoad

__all__ = ["Job", "VirtualReplica"]


class Job:
    """One sequence, and who is told of its first token and its end."""

    __slots__ = ("finished", "first_token", "sequence", "started")

    def __init__(self, sequence: Sequence, first_token: Callable[[Job], None], finished: Callable[[Job], None]) -> None:
        self.sequence = sequence
        self.first_token = first_token
        self.finished = finished
        self.started = False


class _Steady:
    """`steps` equal steps from `began` on, of which `done` are over."""

    __slots__ = ("began", "context", "decodes", "done", "prefill", "prefill_tokens", "steps")

    def __init__(self, decodes: list[Sequence], prefill: Sequence | None, prefill_tokens: int, steps: int) -> None:
        self.decodes = decodes
        self.prefill = prefill
        self.prefill_tokens = prefill_tokens
        self.steps = steps
        self.done = 0
        self.began = 0.0
        self.context = sum(len(sequence.tokens) for sequence in decodes)


class VirtualReplica:
    """`on_events` gets what the cache has stored and removed, as it happens."""

    def __init__(
        self,
        replica_id: str,
        clock: VirtualClock,
        profile: Profile,
        *,
        blocks: int,
        block_size: int,
        host_blocks: int = 0,
        max_running: int = 256,
        max_waiting: int = 100_000,
        on_events: Callable[[str, CacheEvents], None],
        fast: bool = True,
    ) -> None:
        self.id = replica_id
        self.profile = profile
        self.crossover = Crossover(block_size, lambda: profile.of_step)
        cache = PrefixCache(blocks, block_size, host_blocks=host_blocks, worth_onloading=self.crossover.worth_onloading)
        self.scheduler = Scheduler(cache, profile.token_budget, max_running, max_waiting)
        self._runner = SimulatedRunner(
            blocks, block_size, profile.cost, vocab=(0,), virtual=True, host_blocks=host_blocks
        )
        self._clock = clock
        self._on_events = on_events
        self._fast = fast
        self._jobs: dict[str, Job] = {}
        self._stepping = False
        self._steady: _Steady | None = None
        self._came = False
        """Someone, since the scheduler last looked."""
        self._admission_failed = False
        """In the last step, and nothing has changed since."""
        self._event = 0

    def submit(self, job: Job) -> None:
        """Raises what the scheduler raises."""
        self.scheduler.add(job.sequence)
        self._jobs[job.sequence.request_id] = job
        self._came = True
        if not self._stepping:
            self._begin()
        elif self._steady is not None and self._steady.prefill is None:
            self._cut_short(self._steady)

    def stop(self) -> list[Job]:
        """Gone with all it holds, in the middle of whatever it did. The jobs it leaves undone."""
        undone = list(self._jobs.values())
        self._jobs.clear()
        self._event += 1
        self._stepping = False
        self._steady = None
        self.scheduler.start_over()
        return undone

    def load(self) -> ReplicaLoad:
        scheduler, pool = self.scheduler, self.scheduler.cache.pool
        return ReplicaLoad(
            running=scheduler.running,
            waiting=scheduler.waiting,
            queued_prefill_tokens=scheduler.queued_prefill_tokens,
            free_blocks=pool.free_blocks,
            evictable_blocks=pool.cached_blocks,
        )

    def _begin(self) -> None:
        """What comes next, at the end of a step or out of idleness."""
        self._stepping = True
        self._steady = self._find_steady() if self._fast else None
        if self._steady is not None:
            self._steady.began = self._clock.now
            self._await_steady(self._steady)
            return
        self._came = False
        chunks = self.scheduler.schedule()
        if not chunks:
            self._stepping = False
            return
        moved = carry_out(self._runner, self.scheduler.cache.take_moves())
        self.crossover.observe(moved)
        result = self._runner.execute(chunks)
        seconds = moved.offload_seconds + moved.onload_seconds + result.seconds
        self._at(self._clock.now + seconds, self._commit, chunks, result)

    def _commit(self, chunks: list[Chunk], result: StepResult) -> None:
        scheduler = self.scheduler
        idle_before = scheduler.cache.pool.idle_blocks
        over = False
        for progress in scheduler.commit(chunks, result):
            job = self._jobs[progress.sequence.request_id]
            if not job.started:
                job.started = True
                job.first_token(job)
            if progress.sequence.finish_reason is not None:
                over = True
                del self._jobs[progress.sequence.request_id]
                job.finished(job)
        changed = self._publish() or over or scheduler.cache.pool.idle_blocks != idle_before
        only_decodes = all(chunk.end - chunk.start == 1 for chunk in chunks)
        self._admission_failed = scheduler.waiting > 0 and only_decodes and not changed
        self._begin()

    def _publish(self) -> bool:
        events = self.scheduler.cache.take_events()
        if events:
            self._on_events(self.id, events)
        return bool(events)

    # -- steady steps ----------------------------------------------------------------------------------------------

    def _find_steady(self) -> _Steady | None:
        scheduler = self.scheduler
        block_size = scheduler.cache.block_size
        running = scheduler.sequences()[: scheduler.running]
        decodes, prefill = [], None
        steps = 1 << 30
        for sequence in running:
            if sequence.uncomputed_tokens > 1:
                prefill = prefill or sequence
                continue
            output = sequence.output_tokens
            room = len(sequence.block_ids) * block_size - len(sequence.tokens)
            steps = min(steps, room, sequence.params.max_tokens - output - 1 if output else 0)
            if steps < 1:
                return None
            decodes.append(sequence)
        rest = scheduler.token_budget - len(decodes)
        if prefill is not None:
            if rest < 2:
                return None
            steps = min(steps, (prefill.uncomputed_tokens - 1) // rest)
        elif not decodes or (scheduler.waiting and (self._came or not self._admission_failed)):
            return None
        return _Steady(decodes, prefill, rest if prefill is not None else 0, steps) if steps >= 1 else None

    def _await_steady(self, steady: _Steady) -> None:
        if steady.prefill is None:
            self._at(steady.began + self._decode_seconds(steady, steady.steps), self._end_steady, steady)
            return
        cost, start, tokens = self.profile.cost, steady.prefill.computed_tokens, steady.prefill_tokens
        attended = tokens * (2 * start + tokens + 1) / 2 + steady.context + len(steady.decodes) * steady.done
        seconds = (
            cost.base_seconds
            + tokens * cost.per_token_seconds
            + len(steady.decodes) * cost.per_decode_seconds
            + attended * cost.per_token_context_seconds
        )
        self._at(self._clock.now + seconds, self._prefill_step, steady)

    def _prefill_step(self, steady: _Steady) -> None:
        assert steady.prefill is not None
        steady.prefill.computed_tokens += steady.prefill_tokens
        self.scheduler.counters.computed_tokens += steady.prefill_tokens
        self.scheduler.cache.register(steady.prefill)
        self._publish()
        steady.done += 1
        if steady.done < steady.steps:
            self._await_steady(steady)
        else:
            self._end_steady(steady)

    def _end_steady(self, steady: _Steady) -> None:
        answer = array("I", bytes(4 * steady.steps))
        for sequence in steady.decodes:
            cast("array[int]", sequence.tokens).extend(answer)
            sequence.computed_tokens += steady.steps
        self.scheduler.counters.output_tokens += steady.steps * len(steady.decodes)
        self.scheduler.counters.computed_tokens += steady.steps * len(steady.decodes)
        self._steady = None
        self._begin()

    def _cut_short(self, steady: _Steady) -> None:
        """The step under way is the last: after it the scheduler looks at what has come."""
        elapsed = self._clock.now - steady.began
        low, high = 1, steady.steps
        while low < high:
            middle = (low + high) // 2
            if self._decode_seconds(steady, middle) >= elapsed:
                high = middle
            else:
                low = middle + 1
        if low < steady.steps:
            steady.steps = low
            self._await_steady(steady)

    def _decode_seconds(self, steady: _Steady, steps: int) -> float:
        cost, decodes = self.profile.cost, len(steady.decodes)
        attended = steps * steady.context + decodes * steps * (steps - 1) / 2
        return math.fsum(
            (
                steps * (cost.base_seconds + decodes * cost.per_decode_seconds),
                attended * cost.per_token_context_seconds,
            )
        )

    def _at(self, seconds: float, act: Callable[..., None], *arguments: object) -> None:
        """The replica's one next event; an earlier one is void."""
        self._event += 1
        self._clock.at(seconds, self._happen, self._event, act, arguments)

    def _happen(self, event: int, act: Callable[..., None], arguments: Items[object]) -> None:
        if event == self._event:
            act(*arguments)
