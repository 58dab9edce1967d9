"""What Prometheus is told: names, types, bounded labels, and figures that are true."""

from __future__ import annotations

import asyncio
import re
from collections import Counter

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from router.app import Router
from router.histogram import Histogram
from shared.settings import RouterSettings
from tests.fleet_members import Member
from tests.helpers import eventually
from tests.router.conftest import Bench, BenchFactory, chat
from tests.router.fake_replica import hang_up, open_stream

CHAT = "/v1/chat/completions"
STREAM = "warmroute_router_time_to_first_token_seconds_count"
PER_CHUNK = "warmroute_router_time_per_output_chunk_seconds_count"
WHOLE = "warmroute_router_e2e_request_latency_seconds_count"


async def scrape(b: Bench) -> dict[str, Metric]:
    async with b.client.get(b.router.url + "/metrics") as response:
        assert response.headers["content-type"].startswith("text/plain")
        return {family.name: family for family in text_string_to_metric_families(await response.text())}


def value(families: dict[str, Metric], name: str, **labels: str) -> float | None:
    """Of the series with exactly these labels; None where there is no such."""
    samples = [sample for family in families.values() for sample in family.samples]
    return next((s.value for s in samples if s.name == name and s.labels == labels), None)


async def ask(b: Bench, **fields: object) -> None:
    async with b.client.post(b.url, json=chat(**fields)) as response:  # type: ignore[arg-type]
        await response.read()
    await b.settled()


async def test_requests_are_told_by_outcome_and_status_decisions_and_failures_by_replica(bench: BenchFactory) -> None:
    b = await bench(2)
    broken, well = sorted(replica.id for replica in b.replicas)
    b.replica_for(broken).behave = hang_up
    await ask(b)
    async with b.client.post(b.url, data=b"{") as response:
        assert response.status == 400
    families = await scrape(b)
    requests = "warmroute_router_requests_total"
    assert value(families, requests, path=CHAT, outcome="ok", status="200") == 1
    assert value(families, requests, path=CHAT, outcome="invalid_json", status="400") == 1
    for replica in (broken, well):
        labels = {"replica": replica, "policy": "round-robin", "reason": "turn"}
        assert value(families, "warmroute_router_decisions_total", **labels) == 1
    assert value(families, "warmroute_router_replica_failures_total", replica=broken, failure="broken") == 1
    assert value(families, "warmroute_router_retries_total") == 1
    assert value(families, "warmroute_router_requests_in_flight") == 0
    assert value(families, "warmroute_router_replica_requests_in_flight", replica=broken) == 0
    assert value(families, "process_open_fds") is not None


async def test_first_token_and_chunks_are_timed_in_streams_alone(bench: BenchFactory) -> None:
    b = await bench(1)
    first_came = asyncio.Event()

    async def two_events(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(b"data: 1\n\n")
        await first_came.wait()
        await response.write(b"data: 2\r\n\r\n")
        await response.write_eof()
        return response

    await ask(b, stream=False)
    families = await scrape(b)
    assert [value(families, name) for name in (STREAM, PER_CHUNK, WHOLE)] == [0, 0, 1]
    b.replicas[0].behave = two_events
    async with b.client.post(b.url, json=chat()) as response:
        await response.content.readany()
        first_came.set()
        await response.read()
    await b.settled()
    families = await scrape(b)
    assert [value(families, name) for name in (STREAM, PER_CHUNK, WHOLE)] == [1, 1, 2]


async def test_hits_count_only_where_the_engine_told_of_them(bench: BenchFactory) -> None:
    b = await bench(1)
    replica = b.replicas[0].id

    async def silent(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        return web.json_response({"object": "answer"})

    await ask(b)
    b.replicas[0].behave = silent
    await ask(b)
    families = await scrape(b)
    counts = b.router.metrics.replicas[replica]
    assert counts.hit_tokens == 7
    assert counts.prompt_tokens == 2 * counts.queried_tokens
    assert value(families, "warmroute_router_prefix_cache_hits_total", replica=replica) == 7
    assert value(families, "warmroute_router_prefix_cache_queries_total", replica=replica) == counts.queried_tokens


async def test_the_states_of_the_view_and_of_breakers_are_one_series_each(bench: BenchFactory) -> None:
    b = await bench(1)
    replica = b.replicas[0].id
    for _ in range(3):
        b.router.health.failed(replica, 0.0)
    families = await scrape(b)
    views = {s.labels["step"]: s.value for s in families["warmroute_router_view"].samples}
    assert views == {"exact": 0, "stale": 0, "hash": 0, "approximate": 1}
    breaker = {s.labels["state"]: s.value for s in families["warmroute_router_replica_breaker"].samples}
    assert breaker == {"closed": 0, "open": 0, "half-open": 1}


async def test_nothing_that_a_client_makes_up_becomes_a_label_and_replicas_that_left_are_forgotten(
    bench: BenchFactory,
) -> None:
    b = await bench(2)
    await ask(b)
    await ask(b)
    for path in ("/v1/made-up-1", "/made-up-2"):
        async with b.client.get(b.router.url + path, headers={"x-request-id": "made-up"}) as response:
            await response.read()
    await ask(b, user="made-up")
    gone = b.replicas[0].id
    labels = _labels(await scrape(b))
    assert not [text for text in labels if "made-up" in text]
    assert gone in labels
    b.router.fleet.leave(gone)
    assert gone not in _labels(await scrape(b))


async def test_names_are_as_prometheus_wants_them(bench: BenchFactory) -> None:
    """What `promtool check metrics` looks for: help for all, base units, `_total` for counters alone, no name twice."""
    b = await bench(1)
    await ask(b)
    async with b.client.get(b.router.url + "/metrics") as response:
        text = await response.text()
    assert not [name for name, times in Counter(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)).items() if times > 1]
    for family in text_string_to_metric_families(text):
        assert re.fullmatch(r"[a-z][a-z0-9_]*", family.name), family.name
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        assert not re.search(r"_(ms|millis|kb|mb|percent|count|total|sum|bucket)$", family.name), family.name
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total"), sample.name


async def test_redis_and_the_age_of_the_view_are_told(redis_url: str) -> None:
    async with Member(redis_url), Router(RouterSettings(port=0, redis=redis_url)) as router:

        def samples() -> dict[str, float]:
            return {s.name: s.value for family in router.metrics.families() for s in family.samples}

        await eventually(lambda: samples().get("warmroute_router_snapshots_total") == 1, what="its cache read")
        assert samples()["warmroute_router_redis_up"] == 1
        await eventually(lambda: 0 <= samples()["warmroute_router_view_age_seconds"] < 2, what="a recent view")


@given(st.lists(st.floats(0, 10)))
def test_a_histogram_counts_as_prometheus_does(values: list[float]) -> None:
    bounds = (0.5, 1.0, 5.0)
    histogram = Histogram(bounds)
    for each in values:
        histogram.observe(each)
    samples = histogram.family("x", "x").samples
    expected = [float(sum(each <= bound for each in values)) for bound in (*bounds, float("inf"))]
    assert [s.value for s in samples if s.name == "x_bucket"] == expected
    assert next(s.value for s in samples if s.name == "x_sum") == pytest.approx(sum(values))


def _labels(families: dict[str, Metric]) -> set[str]:
    return {text for family in families.values() for s in family.samples for text in s.labels.values()}
