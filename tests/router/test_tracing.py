"""W3C trace context passes through, and OpenTelemetry hears of requests where it is asked to."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict

from router.otel import OtelTracer, tracer_from
from tests.router.conftest import Bench, BenchFactory, chat
from tests.router.fake_replica import FakeReplica, refuse
from tests.router.test_app import program, ready_url

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"
STATE = "vendor=t61rcWkgMzE,other=1"
MALFORMED = [
    "",
    "00",
    f"00-{TRACE}-{SPAN}",
    f"00-{TRACE}-{SPAN}-0",
    f"00-{TRACE}-{SPAN}-01-more",
    f"ff-{TRACE}-{SPAN}-01",
    f"00-{TRACE.upper()}-{SPAN}-01",
    f"00-{'0' * 32}-{SPAN}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"00-{TRACE}-{SPAN}-0x",
    f"01-{TRACE}-{SPAN}-01.more",
]


async def sent_on(b: Bench, *headers: tuple[str, str]) -> dict[str, str]:
    """The trace's headers, as the replica got them."""
    async with b.client.post(b.url, json=chat(), headers=CIMultiDict(headers)) as response:
        await response.read()
    seen = b.replicas[0].seen[-1].headers
    return {name: ",".join(seen.getall(name)) for name in ("traceparent", "tracestate") if name in seen}


@pytest.mark.parametrize("form", ["00-{}-{}-01", "00-{}-{}-00", "01-{}-{}-01-more", "cc-{}-{}-ff"])
async def test_what_is_valid_passes_as_it_came(bench: BenchFactory, form: str) -> None:
    b, parent = await bench(1), form.format(TRACE, SPAN)
    assert await sent_on(b, ("traceparent", parent), ("tracestate", STATE)) == {
        "traceparent": parent,
        "tracestate": STATE,
    }
    assert await sent_on(b, ("TraceParent", parent), ("tracestate", "a=1"), ("tracestate", "b=2")) == {
        "traceparent": parent,
        "tracestate": "a=1,b=2",
    }


@pytest.mark.parametrize("parent", MALFORMED)
async def test_what_is_malformed_is_not_passed_on_nor_its_state(bench: BenchFactory, parent: str) -> None:
    b = await bench(1)
    assert await sent_on(b, ("traceparent", parent), ("tracestate", STATE)) == {}


async def test_two_parents_are_none_and_a_state_alone_means_nothing(bench: BenchFactory) -> None:
    b = await bench(1)
    assert await sent_on(b, ("traceparent", VALID), ("traceparent", VALID), ("tracestate", STATE)) == {}
    assert await sent_on(b, ("tracestate", STATE)) == {}
    assert await sent_on(b) == {}


async def test_the_log_names_the_trace(bench: BenchFactory, caplog: pytest.LogCaptureFixture) -> None:
    b = await bench(1)
    with caplog.at_level(logging.INFO, "router.exchange"):
        await sent_on(b, ("traceparent", VALID))
        await sent_on(b, ("traceparent", VALID.upper()))
    logged = [record.fields for record in caplog.records if record.name == "router.exchange"]  # type: ignore[attr-defined]
    assert [line.get("trace") for line in logged] == [TRACE, None]


class Recorded:
    """A tracer, and the spans that have ended."""

    def __init__(self, **provider: Any) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider(shutdown_on_exit=False, **provider)
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = OtelTracer(self._provider)

    @property
    def spans(self) -> Any:
        return self._exporter.get_finished_spans()


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    pytest.importorskip("opentelemetry.sdk", reason="needs warmroute[otel]")
    made = Recorded()
    yield made
    made.tracer.close()


async def test_a_span_is_the_clients_child_and_the_replicas_parent(bench: BenchFactory, recorded: Recorded) -> None:
    bench.begin_trace = recorded.tracer.begin
    b = await bench(1)
    sent = await sent_on(b, ("traceparent", VALID), ("tracestate", STATE), ("x-request-id", "r-1"))
    await b.settled()
    (span,) = recorded.spans
    assert (span.name, f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (
        "warmroute.request",
        TRACE,
        SPAN,
    )
    assert sent == {"traceparent": f"00-{TRACE}-{span.context.span_id:016x}-01", "tracestate": STATE}
    about = dict(span.attributes)
    assert about["warmroute.replica"] == b.replicas[0].id
    assert (about["warmroute.policy"], about["warmroute.reason"]) == ("round-robin", "turn")
    assert (about["warmroute.cached_tokens"], about["warmroute.outcome"]) == (7, "ok")
    assert (about["warmroute.request_id"], about["http.response.status_code"]) == ("r-1", 200)
    assert span.status.is_ok
    assert span.end_time > span.start_time


async def test_a_malformed_parent_begins_a_new_trace(bench: BenchFactory, recorded: Recorded) -> None:
    bench.begin_trace = recorded.tracer.begin
    b = await bench(1)
    sent = await sent_on(b, ("traceparent", VALID.upper()), ("tracestate", STATE))
    await b.settled()
    (span,) = recorded.spans
    assert span.parent is None
    own = span.context
    assert sent == {"traceparent": f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"}


async def test_what_failed_is_an_error(bench: BenchFactory, recorded: Recorded) -> None:
    bench.begin_trace = recorded.tracer.begin
    b = await bench(1)
    b.replicas[0].behave = refuse(500)
    await sent_on(b)
    await b.settled()
    (span,) = recorded.spans
    assert (span.status.is_ok, span.attributes["warmroute.outcome"]) == (False, "replica_500")


async def test_the_clients_wish_not_to_be_sampled_is_kept(bench: BenchFactory, recorded: Recorded) -> None:
    bench.begin_trace = recorded.tracer.begin
    b = await bench(1)
    sent = await sent_on(b, ("traceparent", f"00-{TRACE}-{SPAN}-00"))
    await b.settled()
    assert recorded.spans == ()
    assert sent["traceparent"].startswith(f"00-{TRACE}-")
    assert sent["traceparent"].endswith("-00")


def test_nobody_is_told_unless_it_is_asked_for() -> None:
    assert tracer_from({}) is None
    assert tracer_from({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}) is None


def test_what_is_not_installed_is_said_and_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    assert tracer_from({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) is None
    assert "pip install 'warmroute[otel]'" in caplog.text


async def test_the_program_sends_spans_to_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs warmroute[otel]")
    received: list[tuple[str, bytes]] = []

    async def collect(request: web.BaseRequest) -> web.Response:
        received.append((request.path, await request.read()))
        return web.Response()

    runner = web.ServerRunner(web.Server(collect))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setitem(os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{runner.addresses[0][1]}")
    async with FakeReplica() as replica, aiohttp.ClientSession() as client:
        with program("--port", "0", "--replica", replica.url) as process:
            url = await asyncio.to_thread(ready_url, process)
            async with client.post(url + "/v1/chat/completions", json=chat()) as response:
                await response.read()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 10) == 0
    assert {path for path, _ in received} == {"/v1/traces"}
    assert b"".join(body for _, body in received).count(b"warmroute.request") >= 1
    await runner.cleanup()
