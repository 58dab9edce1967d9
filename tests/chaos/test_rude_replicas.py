"""Replicas that break off in every state cost their own requests, which are told how they ended, and nobody else's."""

from __future__ import annotations

import asyncio

import aiohttp

from tests.chaos.answers import Load
from tests.chaos.conftest import Chaos
from tests.chaos.rude_replicas import RUDE, rude_replicas

_IMPATIENT = ("--first-byte-timeout-seconds", "1", "--chunk-timeout-seconds", "1")


async def outcome(chaos: Chaos, model: str, number: int) -> str:
    try:
        answer = await chaos.ask(model=model, stream=number % 2 == 0)
    except aiohttp.ClientError:
        return "cut"
    if answer.refused:
        return str(answer.status)
    return "whole" if answer.whole else "told" if answer.told else repr(answer)


async def test_replicas_that_break_off_in_any_state_are_told_of_and_take_nobody_with_them(chaos: Chaos) -> None:
    async with rude_replicas() as urls:
        flags = [flag for url in urls.values() for flag in ("--replica", url)]
        chaos.url = await chaos.ready(chaos.start_router("impatient", *flags, *_IMPATIENT))
        known = {*urls, "tiny"}
        await chaos.until(lambda fleet: {each["model"] for each in fleet["replicas"]} >= known, "all are known")
        wanted = [(name, number) for number in range(5) for name in RUDE]  # more than open a breaker
        async with Load(chaos.url) as load:
            await load.answered(8)
            outcomes = await asyncio.gather(*(outcome(chaos, name, number) for name, number in wanted))
            await load.answered(8)
        await chaos.settled()
        await chaos.hung_up()
    met: dict[str, set[str]] = {name: set() for name in RUDE}
    for (name, _), each in zip(wanted, outcomes, strict=True):
        met[name].add(each)
    assert met == {name: {rudeness.told} for name, rudeness in RUDE.items()}
    assert not load.not_whole
    assert not load.cut
