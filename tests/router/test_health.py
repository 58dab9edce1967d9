"""The breaker, under a clock of the test's own; and which answers count as failures."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from router import prober
from router.fleet import Fleet
from router.health import Health, Trial
from router.prober import Prober
from tests.helpers import eventually
from tests.router.conftest import BenchFactory, chat
from tests.router.fake_replica import answer, refuse


def broken(failures: int = 3) -> Health:
    health = Health()
    for _ in range(failures):
        assert health.begin("a", 0.0) is None
        health.failed("a", 0.0)
    return health


def trial_of(health: Health, now: float) -> Trial:
    trial = health.begin("a", now)
    assert trial is not None
    return trial


def test_it_opens_after_failures_in_a_row_and_for_that_replica_alone() -> None:
    assert broken(2).usable("a", 0.0)
    health = broken(3)
    assert not health.usable("a", 0.5)
    assert health.usable("b", 0.5)
    assert health.state("a", 0.5) == "open"


def test_a_success_starts_the_count_again() -> None:
    health = broken(2)
    health.succeeded("a")
    health.failed("a", 0.0)
    health.failed("a", 0.0)
    assert health.usable("a", 0.0)


def test_one_trial_at_a_time_decides() -> None:
    health = broken()
    assert health.usable("a", 1.5)
    assert health.state("a", 1.5) == "half-open"
    trial_of(health, 1.5)
    assert not health.usable("a", 1.5), "one trial is enough"
    assert health.begin("a", 1.5) is None
    health.succeeded("a")
    assert health.state("a", 1.5) == "closed"


def test_a_failed_trial_doubles_the_pause_up_to_a_bound() -> None:
    health, now = broken(), 1.0
    for pause in (2, 4, 8, 16, 30, 30):
        health.failed("a", now, trial_of(health, now))
        assert not health.usable("a", now + pause - 0.1)
        now += pause
        assert health.usable("a", now)


def test_a_trial_whose_client_left_is_made_again() -> None:
    health = broken()
    health.abandoned("a", trial_of(health, 1.5))
    assert health.usable("a", 1.5)


def test_a_trial_that_answers_and_then_breaks_opens_it_again() -> None:
    health = broken()
    trial = trial_of(health, 1.5)
    health.answering("a")
    assert health.usable("a", 1.5)
    health.failed("a", 1.5, trial)
    assert not health.usable("a", 1.6)


def test_late_failures_of_requests_sent_before_it_opened_do_not_prolong_the_pause() -> None:
    health = broken()
    health.failed("a", 0.9)
    assert health.usable("a", 1.0)


def test_what_was_sent_before_does_not_speak_for_the_trial() -> None:
    health = broken()
    trial = trial_of(health, 1.5)
    health.failed("a", 1.6)
    assert not health.usable("a", 1.6), "the trial goes on"
    health.failed("a", 1.7, trial)
    later = trial_of(health, 3.7)
    health.abandoned("a", trial)
    assert not health.usable("a", 3.7), "an ended trial gives nobody else's away"
    health.abandoned("a", later)
    assert health.usable("a", 3.7)


def test_a_whole_fleet_that_was_away_for_a_moment_is_back_soon() -> None:
    """While every breaker is open they are all asked: a thousand failures are no thousand failed trials."""
    health = broken()
    for number in range(1000):
        now = number / 1000
        health.failed("a", now, health.begin("a", now))
    assert health.usable("a", 1.0)


@given(st.lists(st.tuples(st.sampled_from(["begin", "fail", "answer", "succeed", "leave"]), st.floats(0, 40))))
def test_there_is_never_more_than_one_trial_and_no_replica_is_kept_out_for_ever(
    steps: list[tuple[str, float]],
) -> None:
    health, now, under_way = Health(), 0.0, list[Trial | None]()
    for step, seconds in steps:
        now += seconds
        match step:
            case "begin":
                under_way.append(health.begin("a", now))
            case "fail" if under_way:
                health.failed("a", now, under_way.pop(0))
            case "answer" if under_way:
                health.answering("a")
            case "succeed" if under_way:
                under_way.pop(0)
                health.succeeded("a")
            case "leave" if under_way:
                if (trial := under_way.pop(0)) is not None:
                    health.abandoned("a", trial)
    for trial in under_way:
        if trial is not None:
            health.abandoned("a", trial)
    assert health.usable("a", now + 30.0)


def test_a_replica_that_left_is_forgotten() -> None:
    health = broken()
    health.set_reachable("a", False)
    health.retain({})
    assert health.usable("a", 0.0)
    assert health.reachable("a")


def test_what_one_process_did_is_not_held_against_its_successor() -> None:
    health = Health()
    health.retain({"a": 1.0, "b": 1.0})
    for _ in range(3):
        health.failed("a", 0.0)
        health.failed("b", 0.0)
    health.retain({"a": 1.0, "b": 2.0, "c": 1.0})
    assert not health.usable("a", 0.0)
    assert health.usable("b", 0.0)


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 503])
async def test_pressure_and_client_errors_open_no_breaker(bench: BenchFactory, status: int) -> None:
    b = await bench(1)
    b.replicas[0].behave = refuse(status)
    for _ in range(10):
        async with b.client.post(b.url, json=chat()) as response:
            assert response.status == status
    assert b.router.health.state(b.replicas[0].id, time.monotonic()) == "closed"
    assert not b.router.health._breakers


@pytest.mark.parametrize("status", [500, 502, 504])
async def test_other_server_errors_open_it(bench: BenchFactory, status: int) -> None:
    b = await bench(2)
    ill, well = sorted(replica.id for replica in b.replicas)
    b.replica_for(ill).behave = refuse(status)
    for _ in range(8):
        async with b.client.post(b.url, json=chat()) as response:
            await response.read()
    assert len(b.replica_for(ill).seen) == 3
    assert b.router.health.state(ill, time.monotonic()) != "closed"
    assert b.router.health.state(well, time.monotonic()) == "closed"


async def test_a_half_open_breaker_lets_one_of_many_through(bench: BenchFactory) -> None:
    b = await bench(2)
    ill, well = sorted(replica.id for replica in b.replicas)
    b.replica_for(ill).behave = refuse(500)
    while b.router.health.state(ill, time.monotonic()) == "closed":
        async with b.client.post(b.url, json=chat()) as response:
            await response.read()
    before = len(b.replica_for(ill).seen)
    await eventually(lambda: b.router.health.state(ill, time.monotonic()) == "half-open", what="a trial is due")
    gate = asyncio.Event()

    async def refuse_later(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        await gate.wait()
        return web.Response(status=500)

    b.replica_for(ill).behave = refuse_later
    posts = [asyncio.create_task(b.client.post(b.url, json=chat())) for _ in range(6)]
    await eventually(lambda: sum(post.done() for post in posts) == 5, what="all but the trial answered")
    gate.set()
    await asyncio.gather(*posts)
    assert len(b.replica_for(ill).seen) == before + 1
    assert b.router.health.state(ill, time.monotonic()) == "open"
    b.replica_for(ill).behave = answer
    await eventually(lambda: b.router.health.state(ill, time.monotonic()) == "half-open", what="another is due")
    replicas = set()
    for _ in range(4):
        async with b.client.post(b.url, json=chat()) as response:
            replicas.add(response.headers["x-warmroute-replica"])
            await response.read()
    assert replicas == {ill, well}


async def test_probes_have_one_threshold_down_and_another_up(
    bench: BenchFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known before each probe; and then what it says."""
    story = [
        (False, "up"),
        (True, "down"),
        (True, "up"),
        (True, "down"),
        (True, "down"),
        (False, "up"),
        (False, "down"),
        (False, "up"),
        (False, "up"),
        (True, "up"),
    ]
    monkeypatch.setattr(prober, "_PERIOD_SECONDS", 0.001)
    b = await bench(0)
    health, fleet, known = Health(), Fleet(), list[bool]()

    async def probed(request: web.BaseRequest) -> web.StreamResponse:
        if request.path != "/health":
            return web.Response(status=404)
        known.append(health.reachable(replica.id))
        said = story[len(known) - 1][1] if len(known) <= len(story) else "up"
        return web.Response(status=200 if said == "up" else 500)

    runner = web.ServerRunner(web.Server(probed), shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        replica = fleet.add_static(f"http://127.0.0.1:{runner.addresses[0][1]}")
        watching = Prober(fleet, health, b.router._upstream, [replica], b"Connection: close\r\n")
        task = b.router._upstream._loop.create_task(watching.run())
        await eventually(lambda: len(known) >= len(story), what="all probed")
        task.cancel()
    finally:
        await runner.cleanup()
    assert known[: len(story)] == [reachable for reachable, _ in story]
