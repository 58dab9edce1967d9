"""Locust plays a plan in an open loop: arrivals wait for nobody, latency counts from the schedule."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from loadtest.load_generator import LoadGeneratorError, play
from loadtest.records import RequestRecord
from loadtest.workloads import SHAPES, Plan
from tests.loadtest.scripted_server import Reply, frames, serving, stream

PLAN = Plan(
    "chat",
    replace(SHAPES["chat"], opening_words=5, turn_words=5, turns=4, open_sessions=3, max_tokens=2),
    seed=3,
    rate=20.0,
    requests=24,
)


async def played(reply: Reply, folder: Path, plan: Plan = PLAN) -> list[RequestRecord]:
    async with serving(reply) as url:
        return await asyncio.to_thread(
            play, plan, host=url, model="m", folder=folder, timeout_seconds=10.0, on_progress=lambda done: None
        )


async def test_every_planned_request_is_sent_on_time_with_the_answers_before_it(tmp_path: Path) -> None:
    asked: list[list[dict[str, str]]] = []

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        asked.append(body["messages"])
        headers = {"x-warmroute-replica": "replica-2", "x-warmroute-predicted-tokens": "32"}
        return await stream(request, frames(" so", f" {len(asked)}"), headers=headers)

    records = await played(reply, tmp_path)
    assert [record.error for record in records] == [None] * PLAN.requests
    scheduled = {(s.id, k): turn.at_seconds for s in PLAN.schedule() for k, turn in enumerate(s.turns)}
    assert {(r.session, r.turn): r.scheduled_seconds for r in records} == pytest.approx(scheduled)
    first = records[0]
    assert (first.prompt_tokens, first.cached_tokens, first.completion_tokens) == (40, 16, 2)
    assert (first.replica, first.predicted_tokens, first.status) == ("replica-2", 32, 200)
    assert all(record.ttft_ms and record.e2e_ms and record.ttft_ms <= record.e2e_ms for record in records)
    answers = {record.answer for record in records}
    sessions = {session.id: session for session in PLAN.schedule()}
    for record in records:
        said = [r.answer for r in records if r.session == record.session and r.turn < record.turn]
        assert sessions[record.session].messages(said) in asked
    assert len(answers) == PLAN.requests, "each answer went into its own conversation"


async def test_a_slow_server_meets_the_same_arrivals_and_its_queue_is_not_the_generators_lag(tmp_path: Path) -> None:
    """One conversation, turns every 50 ms, answers after 150 ms: turn k waits for k answers, and that is latency."""
    plan = replace(PLAN, shape=replace(PLAN.shape, open_sessions=1, turns=100), arrivals="fixed", requests=8)

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.15)
        return await stream(request, frames(" yes"))

    records = await played(reply, tmp_path, plan)
    longest = [r for r in records if r.session == max((r.session for r in records), key=_count(records))]
    assert len(longest) >= 3
    for record in longest:
        assert record.ttft_ms is not None
        assert record.ttft_ms >= 150 + record.turn * 100
        assert record.lag_ms < 100
    assert [record.scheduled_seconds for record in records] == pytest.approx([k * 0.05 for k in range(8)])


async def test_after_a_refusal_the_rest_of_the_conversation_has_failed_too(tmp_path: Path) -> None:
    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(body["messages"]) == 4:  # every second turn: system, user, assistant, user
            return web.json_response({"error": {"message": "no room"}}, status=503)
        return await stream(request, frames(" yes"))

    records = await played(reply, tmp_path)
    assert len(records) == PLAN.requests
    assert {(r.turn, r.status, r.error is None) for r in records} <= {
        (0, 200, True),
        (1, 503, False),
        (2, 0, False),
        (3, 0, False),
    }
    assert any("no room" in (record.error or "") for record in records)
    assert any(record.turn == 2 for record in records)


async def test_a_generator_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(LoadGeneratorError, match="must be a URL"):
        await asyncio.to_thread(
            play, PLAN, host="nonsense", model="m", folder=tmp_path, timeout_seconds=0.1, on_progress=lambda done: None
        )


def _count(records: list[RequestRecord]) -> Any:
    return lambda session: sum(record.session == session for record in records)
