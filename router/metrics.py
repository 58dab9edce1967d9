"""The router's Prometheus metrics. Children are looked up once per label set and kept: a request costs additions only.

Labels are bounded: paths are those of the API, outcomes are stable codes, replicas leave with `retain`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.exchange import Exchange

__all__ = ["ReplicaFigures", "RouterMetrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

ReplicaFigures = Mapping[str, Mapping[str, float]]
"""Gauges at the time of the scrape: name -> replica id -> value."""


class _Labelled:
    """A counter whose children are kept by their labels."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._children: dict[tuple[str, ...], Counter] = {}

    def inc(self, *labels: str) -> None:
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = self._counter.labels(*labels)
        child.inc()

    def retain(self, replica_ids: Collection[str]) -> None:
        """The first label is a replica: forget those that left."""
        for labels in [labels for labels in self._children if labels[0] not in replica_ids]:
            self._counter.remove(*labels)
            del self._children[labels]


class RouterMetrics:
    """One registry per router; `figures` is asked at each scrape."""

    def __init__(self, in_flight: Callable[[], int], figures: Callable[[], ReplicaFigures]) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests ended, by outcome", "path", "outcome")
        self._decisions = self._counter(
            "decisions", "Attempts dispatched, by replica and reason", "replica", "policy", "reason"
        )
        self._failures = self._counter("replica_failures", "Attempts that a replica failed", "replica", "failure")
        self._first_byte = Histogram(
            "warmroute_router_first_byte_seconds",
            "From a request's arrival to the first byte of its answer",
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._duration = Histogram(
            "warmroute_router_request_seconds",
            "From a request's arrival to the last byte of its answer",
            registry=self._registry,
            buckets=_SECONDS,
        )
        tokens = Counter(
            "warmroute_router_prompt_tokens",
            "Prompt tokens answered: all, those predicted to be cached, those the engine found cached",
            ["kind"],
            registry=self._registry,
        )
        self._prompt_tokens, self._predicted_tokens, self._cached_tokens = (
            tokens.labels(kind) for kind in ("all", "predicted", "cached")
        )
        self._retries = Counter(
            "warmroute_router_retries", "Requests sent on to another replica", registry=self._registry
        )
        Gauge("warmroute_router_in_flight", "Requests in flight", registry=self._registry).set_function(in_flight)
        self._registry.register(_ReplicaGauges(figures))

    def dispatched(self, replica_id: str, policy: str, reason: str) -> None:
        self._decisions.inc(replica_id, policy, reason)

    def failed(self, replica_id: str, failure: str) -> None:
        self._failures.inc(replica_id, failure)

    def retried(self) -> None:
        self._retries.inc()

    def ended(self, exchange: Exchange) -> None:
        self._requests.inc(exchange.route, exchange.outcome)
        if exchange.ended_seconds is not None:
            self._duration.observe(exchange.ended_seconds - exchange.started_seconds)
        if exchange.first_byte_seconds is not None:
            self._first_byte.observe(exchange.first_byte_seconds)
            if (decision := exchange.decision) is not None:
                self._prompt_tokens.inc(decision.prompt_tokens)
                self._predicted_tokens.inc(decision.predicted_tokens)
        if exchange.cached_tokens is not None:
            self._cached_tokens.inc(exchange.cached_tokens)

    def retain(self, replica_ids: Collection[str]) -> None:
        """Forget the series of replicas that left the fleet."""
        self._decisions.retain(replica_ids)
        self._failures.retain(replica_ids)

    def _counter(self, name: str, help_text: str, *labels: str) -> _Labelled:
        return _Labelled(Counter(f"warmroute_router_{name}", help_text, labels, registry=self._registry))

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _ReplicaGauges(Collector):
    def __init__(self, figures: Callable[[], ReplicaFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        for name, values in self._figures().items():
            family = GaugeMetricFamily(f"warmroute_router_replica_{name}", f"Replica: {name}", labels=["replica"])
            for replica_id, value in values.items():
                family.add_metric([replica_id], value)
            yield family
