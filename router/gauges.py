"""The state of the router and of its fleet as metrics: looked up when Prometheus asks, at no cost to requests.

What is one of several states is one series for each, 1 where it is so: sums over routers then count them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from router.admission import Admission
from router.block_index import BlockIndex
from router.fleet import Fleet
from router.follower import Follower
from router.health import Health
from router.metrics import PREFIX
from router.placement import Placement, View
from router.retries import Retries
from shared.telemetry import dropped_log_lines

__all__ = ["Gauges", "of_process"]

_VIEW_STEPS = ("exact", "stale", "hash", "approximate")
_BREAKER_STATES = ("closed", "open", "half-open")
_PROCESS = ProcessCollector(registry=CollectorRegistry())


@dataclass(frozen=True, slots=True)
class Gauges:
    """`follower` is None where there is no Redis."""

    fleet: Fleet
    index: BlockIndex
    placement: Placement
    health: Health
    admission: Admission
    retries: Retries
    view: Callable[[], View]
    follower: Follower | None
    clock: Callable[[], float] = time.monotonic

    def families(self) -> Iterator[Metric]:
        yield _gauge("info", "The version that runs", {(version("warmroute"),): 1}, "version")
        yield _gauge("requests_in_flight", "Requests in flight", {(): self.admission.in_flight})
        yield _gauge("requests_queued", "Requests that wait until the router takes them", {(): self.admission.queued})
        yield _gauge("tasks", "Tasks of the event loop", {(): len(asyncio.all_tasks())})
        yield _counter("retries_denied", "Requests not sent on, for want of retry budget", {(): self.retries.denied})
        step = self.view().step
        text = "The rung of the ladder: what is known of the caches"
        yield _gauge("view", text, {(known,): known == step for known in _VIEW_STEPS}, "step")
        yield _counter("log_lines_dropped", "Log lines that could not be written", {(): dropped_log_lines()})
        if self.follower is not None:
            yield from _of_follower(self.follower)
        yield from self._of_replicas()

    def _of_replicas(self) -> Iterator[Metric]:
        now, fleet, trust = self.clock(), self.fleet, self.placement.trust.factor
        standings = {replica.id: self.placement.ledger.standing(replica.id, now) for replica in fleet}
        breakers = {replica.id: self.health.state(replica.id, now) for replica in fleet}
        named = (
            ("accepting", "Takes new work", {r.id: r.accepting and self.health.reachable(r.id) for r in fleet}),
            ("requests_in_flight", "Requests there, other routers' too", {i: s.active for i, s in standings.items()}),
            ("wait_seconds", "Prefill on its way there", {i: s.wait_seconds for i, s in standings.items()}),
            ("blocks", "Blocks it is known to hold", {r.id: self.index.held(r.id).device.blocks for r in fleet}),
            ("host_blocks", "In host memory", {r.id: self.index.held(r.id).host.blocks for r in fleet}),
            ("trust", "How far its published cache is believed", {r.id: trust(r.id) for r in fleet}),
        )
        for name, text, values in named:
            yield _gauge(f"replica_{name}", text, {(i,): value for i, value in values.items()}, "replica")
        states = {(i, state): state == now_in for i, now_in in breakers.items() for state in _BREAKER_STATES}
        yield _gauge("replica_breaker", "The state of its circuit breaker", states, "replica", "state")


def of_process() -> Iterable[Metric]:
    """Memory, processor time and open files, under the names that all programs use."""
    return _PROCESS.collect()


def _of_follower(follower: Follower) -> Iterable[Metric]:
    yield _gauge("redis_up", "Redis answers", {(): follower.connected})
    if (age := follower.view.age_seconds) is not None:
        yield _gauge("view_age_seconds", "Since all that Redis tells was known", {(): age})
    rereads = {(reason,): count for reason, count in follower.reread.items()}
    yield _counter("snapshots", "Caches read whole, by the reason", rereads, "reason")
    yield _counter("deltas", "Changes of caches followed", {(): follower.applied_deltas})


def _gauge(name: str, text: str, values: Mapping[Any, float], *labels: str) -> Metric:
    return _with(GaugeMetricFamily(PREFIX + name, text, labels=labels), values)


def _counter(name: str, text: str, values: Mapping[Any, float], *labels: str) -> Metric:
    return _with(CounterMetricFamily(PREFIX + name, text, labels=labels), values)


def _with(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[Any, float]) -> Metric:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
