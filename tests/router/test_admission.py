"""Permits and the wait for them: nothing leaks, whatever happens in whatever order."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from random import Random
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission import Admission
from shared.api import ApiError
from tests.broken_http import answer_to
from tests.helpers import eventually
from tests.router.conftest import Bench, BenchFactory, chat
from tests.router.fake_replica import answer

MOST_SECONDS = 1000.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Request:
    """One that enters, stays until it is told to end, and notes how it ended."""

    def __init__(self, admission: Admission, tenant: str, granted: list[Request]) -> None:
        self.tenant = tenant
        self.outcome = "not begun"
        self.end = asyncio.Event()
        self.task = asyncio.ensure_future(self._run(admission, granted))

    async def _run(self, admission: Admission, granted: list[Request]) -> None:
        self.outcome = "waits"
        try:
            if not admission.try_enter():
                await admission.wait(self.tenant)
        except ApiError as error:
            self.outcome = error.code
            return
        except asyncio.CancelledError:
            self.outcome = "left"
            raise
        try:
            granted.append(self)
            self.outcome = "runs"
            await self.end.wait()
        finally:
            self.outcome = "ended"
            admission.leave()


STEPS = st.one_of(
    st.tuples(st.just("come"), st.sampled_from("abc")),
    st.tuples(st.sampled_from(["end", "leave"]), st.integers(0, 50)),
    st.tuples(st.just("pass"), st.sampled_from([MOST_SECONDS / 3, MOST_SECONDS])),
    st.tuples(st.just("settle"), st.just(0)),
)


async def _play(steps: list[tuple[str, Any]], most: int, most_waiting: int, close: bool) -> None:
    clock, granted, requests = Clock(), list[Request](), list[Request]()
    admission = Admission(most, most_waiting, MOST_SECONDS, lambda tenant: 2.0 if tenant == "a" else 1.0, clock)

    async def settle() -> None:
        for _ in range(4):
            await asyncio.sleep(0)
        running = sum(request.outcome == "runs" for request in requests)
        assert running == admission.in_flight, "a permit was lost or given twice"
        assert sum(request.outcome == "waits" for request in requests) == admission.queued

    for step, value in steps:
        there = [request for request in requests if not request.task.done()]
        match step:
            case "come":
                requests.append(Request(admission, value, granted))
            case "end" if there:
                there[value % len(there)].end.set()
            case "leave" if there:
                there[value % len(there)].task.cancel()
            case "pass":
                clock.now += value
                admission.expire()
            case "settle":
                await settle()
        admission.check_integrity()
    await settle()
    arrivals = {request: number for number, request in enumerate(requests)}
    by_tenant = defaultdict(list)
    for request in granted:
        by_tenant[request.tenant].append(arrivals[request])
    assert all(order == sorted(order) for order in by_tenant.values())
    if close:
        admission.close()
        admission.check_integrity()
        await settle()
        assert not any(request.outcome == "waits" for request in requests)
    for request in requests:
        request.end.set()
    async with asyncio.timeout(5):
        await asyncio.gather(*(request.task for request in requests), return_exceptions=True)
        admission.close()
        await admission.idle()
    assert (admission.in_flight, admission.queued) == (0, 0)
    admission.check_integrity()
    known = {"ended", "left", "not begun", "too_many_requests", "queue_timeout", "shutting_down"}
    assert {request.outcome for request in requests} <= known


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=60), st.integers(1, 3), st.integers(0, 5), st.booleans())
def test_no_permit_leaks_and_order_holds_whatever_happens(
    steps: list[tuple[str, Any]], most: int, most_waiting: int, close: bool
) -> None:
    asyncio.run(_play(steps, most, most_waiting, close))


async def refusal(admission: Admission, tenant: str = "") -> ApiError:
    with pytest.raises(ApiError) as caught:
        await asyncio.wait_for(admission.wait(tenant), 5)
    return caught.value


async def waiting(admission: Admission, *tenants: str) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(admission.wait(tenant)) for tenant in tenants]
    expected = admission.queued + len(tenants)
    await eventually(lambda: admission.queued == expected, what="all in line")
    return tasks


async def test_retry_after_tells_when_the_line_will_have_passed_at_the_pace_of_late() -> None:
    clock = Clock()
    admission = Admission(1, 3, 30.0, clock=clock)
    assert admission.try_enter()
    tasks = await waiting(admission, *[""] * 3)
    for _ in range(2):
        clock.now += 4.0
        admission.leave()
    await waiting(admission, "", "")
    error = await refusal(admission)
    assert (error.status, error.code, error.retry_after_seconds) == (429, "too_many_requests", 16.0)
    clock.now += 10.0
    assert (await refusal(admission)).retry_after_seconds == 40.0, "it has become slower"
    clock.now += 1000.0
    assert (await refusal(admission)).retry_after_seconds == 60.0
    admission.close()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_waits_too_long_is_told_503_and_when_to_come_again() -> None:
    admission = Admission(1, 4, 0.05)
    assert admission.try_enter()
    error = await refusal(admission)
    assert (error.status, error.code, error.headers()["Retry-After"]) == (503, "queue_timeout", "1")
    assert admission.queued == 0
    admission.check_integrity()


async def test_a_tenant_that_fills_the_line_keeps_nobody_out() -> None:
    admission = Admission(1, 4)
    assert admission.try_enter()
    greedy = await waiting(admission, *["greedy"] * 4)
    modest = asyncio.create_task(admission.wait("modest"))
    with pytest.raises(ApiError, match="the most this router takes"):
        await greedy[-1]
    assert admission.queued == 4
    assert (await refusal(admission, "greedy")).status == 429
    admission.leave()
    await greedy[0]
    admission.leave()
    await modest
    admission.close()
    await asyncio.gather(*greedy, return_exceptions=True)


async def test_closing_tells_those_that_wait_and_lets_others_end() -> None:
    admission = Admission(1, 4)
    assert admission.try_enter()
    (task,) = await waiting(admission, "")
    admission.close()
    with pytest.raises(ApiError) as caught:
        await task
    assert (caught.value.status, caught.value.code) == (503, "shutting_down")
    assert not admission.try_enter()
    assert (await refusal(admission)).code == "shutting_down"
    idle = asyncio.create_task(admission.idle())
    await asyncio.sleep(0)
    assert not idle.done()
    admission.leave()
    await asyncio.wait_for(idle, 5)


class Gate:
    """A replica that answers when told to."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        await self.open.wait()
        return await answer(request, body)


async def full(bench: BenchFactory, **given_settings: Any) -> tuple[Bench, Gate, asyncio.Task[Any]]:
    """A router with its one place taken until the gate opens."""
    b = await bench(1, max_in_flight=1, **given_settings)
    gate = b.replicas[0].behave = Gate()
    running = asyncio.create_task(b.client.post(b.url, json=chat(False)))
    await eventually(lambda: b.seen == 1, what="the first request at the replica")
    return b, gate, running


async def test_requests_wait_for_a_place_and_are_answered(bench: BenchFactory) -> None:
    b, gate, running = await full(bench)
    others = [asyncio.create_task(b.client.post(b.url, json=chat(False))) for _ in range(5)]
    await eventually(lambda: b.router.admission.queued == 5, what="five in line")
    assert b.seen == 1
    async with b.client.get(b.router.url + "/metrics") as response:
        assert "warmroute_router_requests_queued 5.0" in await response.text()
    gate.open.set()
    assert [response.status for response in await asyncio.gather(running, *others)] == [200] * 6
    await b.settled()
    async with b.client.get(b.router.url + "/metrics") as response:
        assert "warmroute_router_request_queue_seconds_count 5.0" in await response.text()


async def test_a_client_that_leaves_the_line_is_never_sent_on(bench: BenchFactory) -> None:
    b, gate, running = await full(bench)
    leaving = asyncio.create_task(b.client.post(b.url, json=chat(False)))
    await eventually(lambda: b.router.admission.queued == 1, what="in line")
    leaving.cancel()
    await eventually(lambda: b.router.admission.queued == 0, what="out of line")
    gate.open.set()
    assert (await running).status == 200
    await b.settled()
    assert b.seen == 1


async def test_a_large_body_may_wait_longer_than_bodies_may_take(bench: BenchFactory) -> None:
    b, gate, running = await full(bench, body_timeout_seconds=0.3, head_timeout_seconds=0.6)
    waited = asyncio.create_task(b.client.post(b.url, json=chat(False, text="x" * 900_000)))
    await eventually(lambda: b.router.admission.queued == 1, what="in line")
    status, _, _ = await answer_to(b.router.url, b"GET /hea")
    assert status == 408, "that one came later, and had twice the time that bodies have"
    gate.open.set()
    assert (await running).status == (await waited).status == 200
    await b.settled()


@pytest.mark.parametrize("path", ["/tokenize", "/route", "/v1/messages/count_tokens"])
async def test_prompts_that_the_router_reads_itself_wait_too_and_need_one_place_at_a_time(
    bench: BenchFactory, path: str
) -> None:
    b, gate, running = await full(bench)
    waited = asyncio.create_task(b.client.post(b.router.url + path, json=chat(False)))
    await eventually(lambda: b.router.admission.queued == 1, what="in line")
    gate.open.set()
    assert (await running).status == (await waited).status == 200
    await b.settled()


async def test_clients_that_come_and_go_at_any_time_leave_nothing_behind(bench: BenchFactory) -> None:
    b = await bench(2, max_in_flight=4, max_queue=12, max_queue_seconds=0.05)
    random, statuses = Random(7), Counter[object]()

    async def slow(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        await asyncio.sleep(random.random() / 10)
        return await answer(request, body)

    async def visit() -> None:
        try:
            async with asyncio.timeout(random.random() / 2), b.client.post(b.url, json=chat()) as response:
                await response.read()
                statuses[response.status] += 1
        except TimeoutError:
            statuses["left"] += 1
        b.router.admission.check_integrity()

    for replica in b.replicas:
        replica.behave = slow
    for _ in range(10):
        await asyncio.gather(*(visit() for _ in range(30)))
    await b.settled()
    assert b.router.admission.queued == 0
    assert statuses.keys() == {200, 429, 503, "left"}, statuses


async def test_a_stopping_router_sends_those_away_that_wait(bench: BenchFactory) -> None:
    b, gate, running = await full(bench)
    waited = asyncio.create_task(b.client.post(b.url, json=chat(False)))
    await eventually(lambda: b.router.admission.queued == 1, what="in line")
    draining = asyncio.create_task(b.router.drain(asyncio.Event()))
    assert (await waited).status == 503
    gate.open.set()
    assert (await running).status == 200
    await draining


async def test_tenants_share_a_full_router_by_the_weights_in_the_file(bench: BenchFactory, tmp_path: Any) -> None:
    keys = {"acme": "sk-acme-0123456789", "globex": "sk-globex-0123456789"}
    file = tmp_path / "keys.toml"
    file.write_text(
        "".join(f'[[key]]\nkey = "{key}"\ntenant = "{tenant}"\n' for tenant, key in keys.items()) + "weight = 3\n"
    )
    b = await bench(1, max_in_flight=1, api_keys=str(file))
    gate = b.replicas[0].behave = Gate()

    async def ask(tenant: str) -> None:
        headers = {"x-api-key": keys[tenant]}
        async with b.client.post(b.url, json=chat(False), headers=headers) as response:
            assert response.status == 200
            await response.read()

    tasks = []
    for tenant in ["acme"] + ["acme"] * 12 + ["globex"] * 12:
        tasks.append(asyncio.create_task(ask(tenant)))
        here = len(tasks) - 1
        await eventually(lambda here=here: b.seen + b.router.admission.queued == here + 1)  # type: ignore[misc]
    gate.open.set()
    await asyncio.gather(*tasks)
    served = [seen.headers["x-warmroute-tenant"] for seen in b.replicas[0].seen]
    assert served[1:17].count("globex") == 12
    await b.settled()
