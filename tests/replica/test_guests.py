"""Blocks that leave the pool and come back."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence as Items

import pytest

from replica.block_moves import Onload
from replica.engine import Engine
from replica.guests import GuestLost, Guests, NotEnoughRoom
from replica.prefix_cache import PrefixCache
from replica.runner import Chunk, Runner, RunnerError
from replica.scheduler import Scheduler
from replica.sequence import FinishReason
from tests.helpers import wait_until
from tests.replica.engine_rig import rig
from tests.replica.guest_pool import PROMPT, SIZE, Pool, kv_of
from tests.replica.pool_runner import ROOT, PoolRunner, RunnerAround, answer_to, make_sequence


def test_what_one_pool_saved_another_answers_from() -> None:
    first, second = Pool(), Pool()
    first.answer(PROMPT)
    tokens, kv = first.saved(PROMPT)
    assert (tokens, kv) == (PROMPT[: 4 * SIZE], kv_of(PROMPT[: 4 * SIZE]))

    guest = second.guests.expect(tokens, ROOT)
    second.write(guest, kv)
    assert second.guests.settle(guest) == 4
    assert second.cache.take_events().stored == second.cache.held_keys()
    assert len(second.cache.held_keys()) == second.cache.pool.cached_blocks == 4
    assert second.answer(PROMPT).cached_tokens == 4 * SIZE
    # A prompt of exactly those blocks computes its last token alone: nothing of it is prefilled but what must be.
    assert second.answer(PROMPT[: 4 * SIZE]).cached_tokens == 3 * SIZE


def test_the_part_of_a_block_at_the_end_is_saved_where_parts_are_reused() -> None:
    first, second = Pool(finer=True), Pool(finer=True)
    first.answer(PROMPT, max_tokens=1)
    tokens, kv = first.saved(PROMPT)
    assert (tokens, kv) == (PROMPT, kv_of(PROMPT))
    guest = second.guests.expect(tokens, ROOT)
    second.write(guest, kv)
    assert second.guests.settle(guest) == 4
    assert second.answer([*PROMPT, 9]).cached_tokens == len(PROMPT)


def test_slots_behind_the_end_do_not_leave_with_a_session() -> None:
    pool = Pool(finer=True)
    pool.answer([99] * 16 * SIZE, max_tokens=1)  # somebody else has written to every block
    pool.answer(PROMPT, max_tokens=1)
    tokens, kv = pool.saved(PROMPT)
    assert kv == kv_of(tokens)


def test_what_host_memory_holds_is_saved_as_well() -> None:
    pool = Pool(num_blocks=8, host_blocks=8)
    pool.answer(PROMPT)
    pool.answer([99] * 7 * SIZE)
    assert len(pool.cache.host)
    assert pool.saved(PROMPT) == (PROMPT[: 4 * SIZE], kv_of(PROMPT[: 4 * SIZE]))


def test_where_nothing_can_be_brought_back_what_is_on_the_device_is_saved() -> None:
    pool = Pool(num_blocks=8, host_blocks=8)
    pool.answer(PROMPT)
    pool.answer([99] * 7 * SIZE)
    brought = pool.guests.expect(PROMPT[: 2 * SIZE], ROOT)
    pool.write(brought, kv_of(PROMPT[: 2 * SIZE]))
    pool.guests.settle(brought)
    assert len(pool.cache.match(make_sequence(PROMPT)).host_keys) == 2
    blocker = pool.guests.expect([98] * 6 * SIZE, ROOT)
    assert pool.saved(PROMPT) == (PROMPT[: 2 * SIZE], kv_of(PROMPT[: 2 * SIZE]))
    pool.guests.leave(blocker)
    pool.scheduler.check_integrity()


def test_nothing_held_is_nothing_to_save() -> None:
    pool = Pool()
    assert pool.guests.hold(PROMPT, ROOT) is None
    pool.answer(PROMPT[:SIZE])
    assert pool.guests.hold([1, *PROMPT], ROOT) is None
    pool.scheduler.check_integrity()
    assert not pool.scheduler.guests


def test_a_restore_that_is_not_settled_is_found_by_nobody_and_leaves_nothing() -> None:
    pool = Pool()
    guest = pool.guests.expect(PROMPT[: 4 * SIZE], ROOT)
    pool.write(guest, kv_of(PROMPT[: 3 * SIZE]) + b"x" * 8 * SIZE)
    assert pool.cache.held_keys() == []
    pool.guests.leave(guest)
    pool.guests.leave(guest)
    assert pool.cache.pool.free_blocks == 16
    assert not pool.cache.take_events()
    assert pool.answer(PROMPT).cached_tokens == 0


def test_blocks_that_are_held_already_are_not_written_again() -> None:
    pool = Pool()
    pool.answer(PROMPT[: 2 * SIZE + 1])
    guest = pool.guests.expect(PROMPT[: 4 * SIZE], ROOT)
    assert guest.registered_blocks == 2
    with pytest.raises(AssertionError, match="shared"):
        pool.guests.write(guest, 1, memoryview(bytearray(8 * SIZE)))
    pool.write(guest, kv_of(PROMPT[: 4 * SIZE]))
    assert pool.guests.settle(guest) == 4
    again = pool.guests.expect(PROMPT[: 4 * SIZE], ROOT)
    assert again.registered_blocks == 4
    assert pool.guests.settle(again) == 4
    assert pool.answer(PROMPT).cached_tokens == 4 * SIZE


def test_what_was_computed_while_it_was_restored_is_one_block_in_the_end() -> None:
    pool = Pool()
    sequence = make_sequence(PROMPT, 4)
    pool.scheduler.add(sequence)
    pool.step()  # admitted first: nobody waits for the guest
    guest = pool.guests.expect(PROMPT[: 4 * SIZE], ROOT)
    while sequence.finish_reason is None:
        pool.step()
    pool.write(guest, kv_of(PROMPT[: 4 * SIZE]))
    pool.guests.settle(guest)
    pool.scheduler.check_integrity()
    assert pool.cache.held_blocks == len(set(pool.cache.held_keys()))
    assert pool.answer(PROMPT).cached_tokens == 4 * SIZE


def test_a_request_for_what_is_being_restored_waits_for_it_and_hits_it() -> None:
    pool = Pool()
    guest = pool.guests.expect(PROMPT[: 4 * SIZE], ROOT)
    sequence = make_sequence(PROMPT, 4)
    pool.scheduler.add(sequence)
    pool.step()
    assert pool.stalled
    pool.write(guest, kv_of(PROMPT[: 4 * SIZE]))
    pool.guests.settle(guest)
    while sequence.finish_reason is None:
        pool.step()
    assert sequence.cached_tokens == 4 * SIZE
    assert sequence.tokens[len(PROMPT) :] == answer_to(PROMPT, 4)


def test_a_request_for_more_than_is_being_saved_does_not_wait() -> None:
    pool = Pool()
    pool.answer(PROMPT[: 2 * SIZE + 1])
    guest = pool.guests.hold(PROMPT, ROOT)
    assert guest is not None
    assert pool.answer(PROMPT).cached_tokens == 2 * SIZE
    pool.guests.leave(guest)


def test_a_restore_never_takes_blocks_in_use_nor_those_that_the_next_decodes_need() -> None:
    pool = Pool(num_blocks=8)
    pool.scheduler.add(make_sequence([1] * 4 * SIZE, max_tokens=9))
    pool.step()
    used = pool.cache.pool.used_blocks
    with pytest.raises(NotEnoughRoom, match="are in use") as raised:
        pool.guests.expect([2] * (8 - used) * SIZE, ROOT)
    assert not raised.value.forever
    pool.scheduler.check_integrity()
    guest = pool.guests.expect([2] * (8 - used - 1) * SIZE, ROOT)
    pool.guests.leave(guest)
    # Part of it is held, and still it never fits.
    with pytest.raises(NotEnoughRoom, match="8 in all") as raised:
        pool.guests.expect([1] * 9 * SIZE, ROOT)
    assert raised.value.forever


def test_a_guest_is_told_when_the_cache_has_started_over() -> None:
    pool = Pool()
    pool.answer(PROMPT)
    saving, restoring = pool.guests.hold(PROMPT, ROOT), pool.guests.expect([5] * SIZE, ROOT)
    assert saving is not None
    pool.scheduler.start_over()
    with pytest.raises(GuestLost):
        pool.guests.read(saving, 0, 1)
    with pytest.raises(GuestLost):
        pool.guests.write(restoring, 0, memoryview(bytearray(8 * SIZE)))
    with pytest.raises(GuestLost):
        pool.guests.settle(restoring)
    for guest in (saving, restoring):
        pool.guests.leave(guest)
    pool.scheduler.check_integrity()
    assert pool.cache.pool.free_blocks == 16


# -- in the engine's thread --------------------------------------------------------------------------------------------


def test_requests_that_guests_leave_no_room_for_wait_and_then_run() -> None:
    with rig(num_blocks=8) as r:
        guest = r.engine.visit(Guests.expect, [1] * 6 * SIZE, ROOT).result(10)
        waiting = r.submit([2] * 4 * SIZE)
        wait_until(lambda: r.engine.load().waiting == 1, what="a request that waits")
        assert not r.listener.ended(waiting)
        r.engine.visit(Guests.leave, guest).result(10)
        assert r.listener.answer(waiting) == answer_to([2] * 4 * SIZE, 4)
        assert r.engine.state().failed_steps == 0


def test_an_engine_that_only_waits_for_a_guest_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(num_blocks=8) as r:
        guest = r.engine.visit(Guests.expect, [1] * 6 * SIZE, ROOT).result(10)
        schedule, looks = r.scheduler.schedule, itertools.count()

        def counted() -> list[Chunk]:
            next(looks)
            return schedule()

        monkeypatch.setattr(r.scheduler, "schedule", counted)
        waiting = r.submit([2] * 4 * SIZE)
        for _ in range(100):
            r.engine.describe().result(10)
        assert next(looks) <= 102  # once for the request, once for each question
        r.engine.visit(Guests.leave, guest).result(10)
        assert r.listener.answer(waiting) == answer_to([2] * 4 * SIZE, 4)


def test_a_running_request_that_a_guest_leaves_no_room_for_goes_on_later() -> None:
    with rig(num_blocks=8) as r:
        r.hold()
        running = r.submit([2] * 4 * SIZE, max_tokens=3 * SIZE)
        r.runner.in_step.wait(10)
        expecting = r.engine.visit(Guests.expect, [1] * 2 * SIZE, ROOT)
        r.release()
        guest = expecting.result(10)
        wait_until(lambda: r.scheduler.counters.preemptions, what="a preemption")
        r.engine.visit(Guests.leave, guest).result(10)
        assert r.listener.answer(running) == answer_to([2] * 4 * SIZE, 3 * SIZE)
        assert r.listener.last(running).finish_reason is FinishReason.LENGTH


def test_steps_go_on_between_the_portions_of_a_save() -> None:
    with rig() as r:
        r.listener.answer(r.submit(PROMPT))
        guest = r.engine.visit(Guests.hold, PROMPT, ROOT).result(10)
        assert guest is not None
        read = [bytes(r.engine.visit(Guests.read, guest, 0, 2).result(10))]
        r.listener.answer(r.submit([3] * 50 * SIZE))
        read.append(bytes(r.engine.visit(Guests.read, guest, 2, 4).result(10)))
        r.engine.visit(Guests.leave, guest).result(10)
        assert b"".join(read) == kv_of(PROMPT[: 4 * SIZE])


def test_restored_blocks_are_published_and_a_stopping_engine_lets_nobody_in() -> None:
    with rig() as r:
        guest = r.engine.visit(Guests.expect, PROMPT[: 4 * SIZE], ROOT).result(10)
        r.engine.visit(Guests.write, guest, 0, memoryview(bytearray(kv_of(PROMPT[: 4 * SIZE])))).result(10)
        assert r.engine.visit(Guests.settle, guest).result(10) == 4
        wait_until(lambda: len(r.listener.published) == 4, what="what was restored being published")
        assert r.listener.answer(r.submit(PROMPT)) == answer_to(PROMPT, 4)
        assert r.listener.events[next(reversed(r.listener.events))][-1].cached_tokens == 4 * SIZE


class BrokenBus(RunnerAround):
    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.broken = threading.Event()
        self.onload_blocks = self._onload

    def _onload(self, moves: Items[Onload]) -> float:
        raise RunnerError("the bus is gone")


def test_blocks_lost_on_the_way_to_a_guest_start_the_cache_over() -> None:
    inner = PoolRunner(8, SIZE, host_blocks=8)
    scheduler = Scheduler(PrefixCache(8, SIZE, host_blocks=8), token_budget=32, max_running=4, max_waiting=8)
    done = threading.Event()
    engine = Engine(
        BrokenBus(inner),
        scheduler,
        deliver=lambda events: done.set() if events[-1].finish_reason else None,
        on_cache_events=lambda events: None,
    )
    try:
        for prompt in (PROMPT, [99] * 7 * SIZE):
            done.clear()
            engine.submit(make_sequence(prompt))
            assert done.wait(10)
        with pytest.raises(GuestLost):
            engine.visit(Guests.hold, PROMPT, ROOT).result(10)
        assert engine.state().held_blocks == 0
        assert engine.visit(Guests.hold, PROMPT, ROOT).result(10) is None
    finally:
        engine.stop(10)
    scheduler.check_integrity()
