"""Which failed requests go to another replica, and how often at most."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from typing import get_args

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from router.retries import Failing, Retries
from router.upstream import Upstream, UpstreamError
from tests.helpers import eventually
from tests.router.conftest import Bench, BenchFactory, chat
from tests.router.fake_replica import FakeReplica, answer, hang_up, open_stream, refuse
from tests.router.test_failures import first_in_turn, raw_server, read_request

CHAT, FILES = "/v1/chat/completions", "/v1/files"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("unanswered", "generation", "other_post", "get"),
    [("none", False, False, True), ("generation", True, False, True), ("all", True, True, True)],
)
@pytest.mark.parametrize("failing", ["unanswered", "lost"])
def test_what_may_have_been_executed_is_repeated_where_that_is_safe_or_allowed(
    failing: Failing, unanswered: str, generation: bool, other_post: bool, get: bool
) -> None:
    retries = Retries(1.0, unanswered)
    assert retries.allows(failing, "POST", CHAT) == generation
    assert retries.allows(failing, "POST", "/tokenize") == generation
    assert retries.allows(failing, "POST", FILES) == other_post
    assert retries.allows(failing, "DELETE", FILES) == other_post
    assert retries.allows(failing, "GET", FILES) == get


@pytest.mark.parametrize("unanswered", ["none", "generation", "all"])
def test_what_was_never_executed_is_always_sent_on(unanswered: str) -> None:
    assert Retries(0.0, unanswered).allows("refused", "POST", FILES)


@given(
    st.floats(0, 1),
    st.lists(
        st.one_of(st.just("arrived"), st.sampled_from(get_args(Failing)), st.floats(0, 100)), min_size=1, max_size=400
    ),
)
def test_retries_stay_within_a_share_of_requests_and_a_floor(budget: float, steps: list[str | float]) -> None:
    clock = Clock()
    retries, arrived, allowed, asked = Retries(budget, "all", clock), 0, 0, 0
    for step in steps:
        if isinstance(step, float):
            clock.now += step
        elif step == "arrived":
            arrived += 1
            retries.arrived()
        elif step == "lost":
            assert retries.allows("lost", "POST", CHAT)
        else:
            asked += 1
            allowed += retries.allows(step, "POST", CHAT)  # type: ignore[arg-type]
    assert allowed <= 200 + budget * arrived + 2 * clock.now + 1e-6
    assert allowed + retries.denied == asked


def test_a_good_time_pays_for_no_more_than_a_burst_and_a_bad_one_ends() -> None:
    clock = Clock()
    retries = Retries(0.25, "all", clock)
    for _ in range(100_000):
        retries.arrived()
    assert sum(retries.allows("refused", "POST", CHAT) for _ in range(1000)) == 200
    clock.now = 5.0
    assert sum(retries.allows("refused", "POST", CHAT) for _ in range(1000)) == 10
    for _ in range(40):
        retries.arrived()
    assert sum(retries.allows("refused", "POST", CHAT) for _ in range(1000)) == 10


async def ask(b: Bench, path: str = CHAT, method: str = "POST") -> tuple[int, bytes]:
    async with b.client.request(method, b.router.url + path, json=chat(False)) as response:
        return response.status, await response.read()


async def spend_all(b: Bench) -> None:
    """And let no time pass for the budget from now on."""
    retries = b.router.retries
    now = time.monotonic()
    retries._clock = lambda: now
    while retries.allows("refused", "POST", CHAT):
        pass
    assert retries.denied == 1


async def test_without_budget_the_failure_is_the_answer_and_metrics_say_so(bench: BenchFactory) -> None:
    b = await bench(2, retry_budget=0.0)
    for replica in b.replicas:
        replica.behave = refuse(503)
    await spend_all(b)
    assert await ask(b) == (503, b'{"refused": 503}')
    assert b.seen == 1
    async with b.client.get(b.router.url + "/metrics") as response:
        assert "warmroute_router_retries_denied_total 2.0" in await response.text()
    await b.settled()


async def test_a_sick_fleet_is_not_asked_twice_for_everything(bench: BenchFactory) -> None:
    b = await bench(2)
    for replica in b.replicas:
        replica.behave = refuse(503)
    await spend_all(b)
    for _ in range(40):
        assert (await ask(b))[0] == 503
    assert b.seen == 40 + 8, "a fifth of the requests"


@pytest.mark.parametrize(("unanswered", "asked"), [("generation", 1), ("all", 2)])
async def test_another_post_that_may_have_been_executed_is_not_repeated_unless_allowed(
    bench: BenchFactory, unanswered: str, asked: int
) -> None:
    b = await bench(2, retry_unanswered=unanswered)
    for replica in b.replicas:
        replica.behave = hang_up
    assert (await ask(b, FILES))[0] == 502
    assert b.seen == asked
    await b.settled()


async def test_a_generation_that_may_have_been_executed_is_not_repeated_where_forbidden(bench: BenchFactory) -> None:
    b = await bench(2, retry_unanswered="none")
    b.replica_for(first_in_turn(b)[0]).behave = hang_up
    status, body = await ask(b)
    assert (status, json.loads(body)["error"]["code"], b.seen) == (502, "replica_failed", 1)
    await b.settled()


async def test_a_replica_that_cannot_be_reached_costs_any_post_nothing(bench: BenchFactory) -> None:
    b = await bench(2, retry_unanswered="none", retry_budget=0.0)
    await spend_all(b)
    await b.replica_for(first_in_turn(b)[0]).stop()
    assert [(await ask(b, FILES))[0] for _ in range(2)] == [200, 200]


@pytest.mark.parametrize("status", [400, 401, 404, 408, 409, 422, 429])
async def test_a_client_error_or_a_full_replica_is_never_retried(bench: BenchFactory, status: int) -> None:
    b = await bench(2)
    for replica in b.replicas:
        replica.behave = refuse(status, **{"Retry-After": "7"})
    assert (await ask(b))[0] == status
    assert b.seen == 1


async def test_the_deadline_spans_all_attempts(bench: BenchFactory) -> None:
    async def slow_death(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        await asyncio.sleep(1.5)
        return await hang_up(request, body)

    async def endless(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(b"data: 1\n\n")
        await asyncio.Event().wait()
        return response

    b = await bench(2, request_timeout_seconds=2.0)
    first, second = first_in_turn(b)
    b.replica_for(first).behave, b.replica_for(second).behave = slow_death, endless
    loop = asyncio.get_running_loop()
    begun = loop.time()
    async with b.client.post(b.url, json=chat()) as response:
        assert response.headers["x-warmroute-replica"] == second
        assert b"longer than requests may" in await response.read()
    assert 1.9 < loop.time() - begun < 3.4, "not 2 s for each attempt"
    await b.settled()


async def test_time_spent_in_the_queue_counts_and_a_request_without_any_is_not_sent(bench: BenchFactory) -> None:
    async def silent(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        await asyncio.Event().wait()
        return web.Response()

    b = await bench(1, max_in_flight=1, request_timeout_seconds=0.3)
    b.replicas[0].behave = silent
    first = asyncio.create_task(ask(b))
    await eventually(lambda: b.seen == 1, what="the first at the replica")
    status, body = await ask(b)
    assert (status, json.loads(body)["error"]["code"]) == (504, "replica_timeout")
    assert (await first)[0] == 504
    await b.settled()


async def test_a_router_that_stops_says_so_to_those_without_a_byte_and_blames_nobody(bench: BenchFactory) -> None:
    async def silent(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        await asyncio.Event().wait()
        return web.Response()

    b = await bench(2, grace_seconds=0)
    for replica in b.replicas:
        replica.behave = silent
    waiting = asyncio.create_task(b.client.post(b.url, json=chat()))
    await eventually(lambda: b.seen == 1, what="the request at a replica")
    await b.router.drain(asyncio.Event())
    try:
        response = await waiting
    except aiohttp.ClientError:
        pytest.fail("hung up without a word")
    assert (response.status, (await response.json())["error"]["code"]) == (503, "shutting_down")
    assert b.seen == 1
    assert not any(b.router.health._breakers.values())


async def test_a_death_on_a_reused_connection_is_no_stale_connection_and_counts_as_sent() -> None:
    requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await read_request(reader)
        requests += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await read_request(reader)
        requests += 1
        await asyncio.sleep(1.1)  # computing, and not yet done
        writer.transport.abort()

    def fresh() -> Upstream:
        return Upstream(
            connect_timeout_seconds=10.0,
            first_byte_timeout_seconds=10.0,
            chunk_timeout_seconds=10.0,
            request_timeout_seconds=10.0,
        )

    async with raw_server(serve) as url, fresh() as upstream:
        response = await upstream.open("POST", url, "/", b"", b"{}")
        assert await response.read() == b"{}"
        response.close()
        with pytest.raises(UpstreamError) as caught:
            await upstream.open("POST", url, "/", b"", b"{}")
        assert (caught.value.failure, caught.value.sent, requests) == ("broken", True, 2)
    async with fresh() as upstream:
        with pytest.raises(UpstreamError) as caught:
            await upstream.open("POST", url, "/", b"", b"{}")
        assert (caught.value.failure, caught.value.sent) == ("unreachable", False)


@pytest.mark.parametrize(("path", "status"), [(CHAT, 200), (FILES, 502)])
async def test_an_old_connection_that_breaks_and_then_nobody_there_is_no_retry_but_may_have_been_executed(
    bench: BenchFactory, path: str, status: int
) -> None:
    """As when a replica is killed: its pooled connections look as if they had been closed long ago."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        with suppress(asyncio.IncompleteReadError):
            await read_request(reader)
            server.close()
            await asyncio.sleep(0)
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    release = asyncio.Event()

    async def busy(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        if len(well.seen) == 1:
            await release.wait()
        return await answer(request, body)

    b = await bench(0, max_retries=0, policy="least-loaded")
    dying = b.router.fleet.add_static(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert (await ask(b, path))[0] == 200
    async with FakeReplica() as well:
        well.behave = busy
        b.router.fleet.add_static(well.url)
        b.router.fleet.drain(dying.id)
        first = asyncio.create_task(ask(b, path))
        await eventually(lambda: well.seen, what="the other replica busy")
        b.router.fleet.drain(dying.id, False)
        assert (await ask(b, path))[0] == status
        assert b.router.health._breakers[dying.id].failures == 1
        release.set()
        assert (await first)[0] == 200
    await b.settled()
