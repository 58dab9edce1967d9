"""Replicas and Redis die, freeze, slow down and come back under load: only what was under way on the dead is lost.

What is lost is told: a stream ends with an error event, and everyone else has a whole answer.
"""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.chaos.answers import Load
from tests.chaos.conftest import Chaos, accepting


@pytest.mark.parametrize("same_address", [False, True], ids=["elsewhere", "at its old address"])
async def test_a_killed_replica_costs_only_streams_that_it_was_answering_and_comes_back(
    chaos: Chaos, same_address: bool
) -> None:
    first_epoch = epoch_of(await chaos.fleet(), "r1")
    async with Load(chaos.url) as load:
        await load.answered(6, by="r1")
        chaos.kill("r1")
        if not same_address:  # else it is back before its lease has ended
            await load.answered(40)
        await chaos.restart_replica("r1", same_address=same_address)
        await chaos.until(lambda fleet: len(accepting(fleet)) == 3, "r1 back")
        await chaos.until(lambda fleet: epoch_of(fleet, "r1") > first_epoch, "a new epoch")
        await load.answered(3, by="r1")
    assert all(answer.told and answer.replica == "r1" for answer in load.not_whole), load.not_whole
    assert len(load.not_whole) <= 8
    assert not load.cut
    await chaos.settled()
    await chaos.hung_up()


async def test_a_frozen_replica_takes_no_other_with_it_and_goes_on_where_it_was(chaos: Chaos) -> None:
    async with Load(chaos.url) as load:
        await load.answered(6, by="r2")
        chaos.signal("r2", signal.SIGSTOP)
        await chaos.until(lambda fleet: "r2" not in accepting(fleet), "r2's lease has ended")
        await load.answered(20)
        chaos.signal("r2", signal.SIGCONT)
        await chaos.until(lambda fleet: len(accepting(fleet)) == 3, "r2 back")
        await load.answered(3, by="r2")
    assert all(answer.told and answer.replica == "r2" for answer in load.not_whole), load.not_whole
    assert not load.cut
    await chaos.settled()


async def test_a_replica_that_stumbles_is_slow_and_nothing_else(chaos: Chaos) -> None:
    async with Load(chaos.url) as load:
        for _ in range(8):  # shorter than its lease
            chaos.signal("r3", signal.SIGSTOP)
            await load.answered(4)
            chaos.signal("r3", signal.SIGCONT)
            await load.answered(1, by="r3")
    assert not load.not_whole
    assert not load.cut
    assert {answer.replica for answer in load.answers} == {"r1", "r2", "r3"}
    await chaos.settled()


async def test_a_replica_that_is_stopped_in_order_loses_nothing(chaos: Chaos) -> None:
    async with Load(chaos.url) as load:
        await load.answered(6, by="r1")
        chaos.replicas["r1"].terminate()
        assert await asyncio.to_thread(chaos.replicas["r1"].wait, 20)
        await load.answered(20)
    assert not load.not_whole
    assert not load.cut
    assert chaos.replicas["r1"].exit_code == 0
    await chaos.settled()


async def test_without_any_replica_everyone_is_told_and_the_first_that_is_back_answers(chaos: Chaos) -> None:
    async with Load(chaos.url) as load:
        await load.answered(10)
        for name in chaos.replicas:
            chaos.kill(name)
        await chaos.until(lambda fleet: not accepting(fleet), "all leases have ended")
        await chaos.restart_replica("r2")
        await load.answered(20)
    assert all(answer.told or answer.refused for answer in load.not_whole), load.not_whole
    assert {answer.status for answer in load.not_whole} <= {200, 502, 503}
    assert not load.cut
    await chaos.settled()
    await chaos.hung_up()


async def test_without_redis_and_with_an_empty_one_every_request_is_answered(chaos: Chaos) -> None:
    async with Load(chaos.url) as load:
        await load.answered(10)
        chaos.redis.kill()
        await chaos.until(lambda fleet: fleet["view"] == "stale", "Redis is missed")
        await load.answered(40)
        chaos.redis.restart()
        await chaos.until(lambda fleet: fleet["view"] == "exact" and len(accepting(fleet)) == 3, "all published anew")
        await load.answered(20)
    assert not load.not_whole
    assert not load.cut
    await chaos.settled()


async def test_a_redis_that_freezes_holds_nobody_up(chaos: Chaos) -> None:
    async with Load(chaos.url) as load:
        await load.answered(10)
        chaos.redis.freeze()
        await chaos.until(lambda fleet: fleet["view"] == "stale", "Redis is missed")
        await load.answered(40)
        chaos.redis.thaw()
        await chaos.until(lambda fleet: fleet["view"] == "exact" and len(accepting(fleet)) == 3, "all as before")
        await load.answered(20)
    assert not load.not_whole
    assert not load.cut
    await chaos.settled()


async def test_two_replicas_and_redis_at_once_leave_one_that_answers_everyone(chaos: Chaos) -> None:
    async with Load(chaos.url) as load:
        await load.answered(10)
        chaos.redis.kill()
        chaos.kill("r1")
        chaos.kill("r2")
        await load.answered(10, by="r3")
        chaos.redis.restart()
        await chaos.restart_replica("r1")
        await chaos.restart_replica("r2")
        await chaos.until(lambda fleet: fleet["view"] == "exact" and len(accepting(fleet)) == 3, "all as before")
        await load.answered(3, by="r1")
        await load.answered(3, by="r2")
    # Whoever moved on from one to the other just before that went too has been retried as often as requests are.
    ended = [answer.told or (answer.refused and answer.status == 502) for answer in load.not_whole]
    assert all(ended), load.not_whole
    assert {answer.replica for answer in load.not_whole} <= {"r1", "r2"}
    assert not load.cut
    await chaos.settled()


async def test_a_replica_that_freezes_while_redis_is_away_is_found_by_probes(chaos: Chaos) -> None:
    async with Load(chaos.url) as load:
        await load.answered(10)
        chaos.redis.kill()
        chaos.signal("r2", signal.SIGSTOP)
        await chaos.until(lambda fleet: not all(each["reachable"] for each in fleet["replicas"]), "r2 is missed")
        await load.answered(20)
        chaos.signal("r2", signal.SIGCONT)
        await load.answered(3, by="r2")
        chaos.redis.restart()
        await chaos.until(lambda fleet: fleet["view"] == "exact" and len(accepting(fleet)) == 3, "all as before")
    assert all(answer.told and answer.replica == "r2" for answer in load.not_whole), load.not_whole
    assert not load.cut
    await chaos.settled()


def epoch_of(fleet: dict[str, object], name: str) -> int:
    replicas = fleet["replicas"]
    assert isinstance(replicas, list)
    return next((int(each["epoch"]) for each in replicas if each["id"] == name), 0)
