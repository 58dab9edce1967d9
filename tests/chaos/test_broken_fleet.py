"""Replicas and Redis die, freeze and come back under load: nothing is lost but what was under way on the dead."""

from __future__ import annotations

import asyncio
import signal

from tests.chaos.conftest import Answer, Chaos, accepting
from tests.helpers import eventually


class Load:
    """Eight clients that ask one request after the other, streamed and whole in turn, until the end of the block."""

    def __init__(self, chaos: Chaos) -> None:
        self._chaos = chaos
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self.answers: list[Answer] = []

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(8)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        async with asyncio.timeout(60):
            await asyncio.gather(*self._tasks)

    async def answered(self, count: int, by: str = "") -> None:
        """Until that many more answers have come, from that replica."""
        seen = len(self.answers)
        await eventually(
            lambda: sum(not by or answer.replica == by for answer in self.answers[seen:]) >= count,
            30,
            f"{count} more answers",
        )

    async def _client(self, number: int) -> None:
        turn = 0
        while not self._stopping:
            self.answers.append(await self._chaos.ask(stream=turn % 2 == 0, number=100 * number + turn))
            turn += 1


async def test_a_killed_replica_costs_only_streams_that_it_was_answering_and_comes_back(chaos: Chaos) -> None:
    async with Load(chaos) as load:
        await load.answered(6, by="r1")
        chaos.kill("r1")
        await load.answered(40)
        await chaos.restart_replica("r1")
        await chaos.until(lambda fleet: len(accepting(fleet)) == 3, "r1 back")
        await load.answered(3, by="r1")
    lost = [answer for answer in load.answers if not answer.whole]
    assert all(answer.told and answer.replica == "r1" for answer in lost), [answer.body[-300:] for answer in lost]
    assert len(lost) <= 8
    await chaos.settled()


async def test_a_frozen_replica_takes_no_other_with_it_and_goes_on_where_it_was(chaos: Chaos) -> None:
    async with Load(chaos) as load:
        await load.answered(6, by="r2")
        chaos.signal("r2", signal.SIGSTOP)
        await chaos.until(lambda fleet: "r2" not in accepting(fleet), "r2's lease has ended")
        await load.answered(20)
        chaos.signal("r2", signal.SIGCONT)
        await chaos.until(lambda fleet: len(accepting(fleet)) == 3, "r2 back")
        await load.answered(3, by="r2")
    assert all(answer.whole for answer in load.answers if answer.replica != "r2")
    assert all(answer.whole or answer.told for answer in load.answers)
    await chaos.settled()


async def test_without_redis_and_with_an_empty_one_every_request_is_answered(chaos: Chaos) -> None:
    async with Load(chaos) as load:
        await load.answered(10)
        chaos.redis.kill()
        await chaos.until(lambda fleet: fleet["view"] == "stale", "Redis is missed")
        await load.answered(40)
        chaos.redis.restart()
        await chaos.until(lambda fleet: fleet["view"] == "exact" and len(accepting(fleet)) == 3, "all published anew")
        await load.answered(20)
    assert all(answer.whole for answer in load.answers)
    await chaos.settled()
