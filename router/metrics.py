"""What the router counts. A request costs additions to plain numbers; Prometheus' shapes are made when it asks.

    requests      path, outcome, status                     paths are those of the API, outcomes and statuses are few
    replicas      replica (reason | failure)                forgotten when the replica leaves: see `retain`
    histograms    time to first token, per chunk after it, whole request, wait for a place

Names follow the field's (vLLM's, and OpenTelemetry's for generative models) with the prefix `warmroute_router_`. What
is a state rather than a count (load, breakers, trust, the view) is read at each scrape: see `gauges`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.exchange import Exchange, route_of
from router.histogram import Histogram
from router.recent import RecentRequests

__all__ = ["PREFIX", "ReplicaCounts", "RouterMetrics", "exposition"]

PREFIX = "warmroute_router_"
_REQUEST_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 500.0)
_CHUNK_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5)


class ReplicaCounts:
    """Of one replica. Tokens of prompts whose answer began; hits only where the engine told of them."""

    __slots__ = ("decisions", "failures", "hit_tokens", "predicted_tokens", "prompt_tokens", "queried_tokens")

    def __init__(self) -> None:
        self.decisions: dict[tuple[str, str], int] = {}
        """By policy and reason."""
        self.failures: dict[str, int] = {}
        self.prompt_tokens = 0
        self.queried_tokens = 0
        self.predicted_tokens = 0
        self.hit_tokens = 0


class RouterMetrics:
    """`gauges` is asked at each scrape."""

    def __init__(self, gauges: Callable[[], Iterable[Metric]] = tuple) -> None:
        self._gauges = gauges
        self.requests: dict[tuple[str, str, int], int] = {}
        """By path, outcome and status."""
        self.retries = 0
        self.replicas: dict[str, ReplicaCounts] = {}
        self.first_token = Histogram(_REQUEST_SECONDS)
        self.per_chunk = Histogram(_CHUNK_SECONDS)
        self.whole_request = Histogram(_REQUEST_SECONDS)
        self.queued = Histogram(_REQUEST_SECONDS)
        self.recent = RecentRequests()

    def dispatched(self, replica_id: str, policy: str, reason: str) -> None:
        decisions, key = self._of(replica_id).decisions, (policy, reason)
        decisions[key] = decisions.get(key, 0) + 1

    def failed(self, replica_id: str, failure: str) -> None:
        failures = self._of(replica_id).failures
        failures[failure] = failures.get(failure, 0) + 1

    def retried(self) -> None:
        self.retries += 1

    def refused(self, path: str, code: str, status: int) -> None:
        """Before it was anybody's turn: no key, no such path, not yet ready."""
        key = (route_of(path), code, status)
        self.requests[key] = self.requests.get(key, 0) + 1

    def ended(self, exchange: Exchange) -> None:
        key = (exchange.route, exchange.outcome, exchange.status)
        self.requests[key] = self.requests.get(key, 0) + 1
        seconds, first_seconds = exchange.seconds, exchange.first_byte_seconds
        if seconds is not None:
            self.whole_request.observe(seconds)
        if exchange.queued_seconds is not None:
            self.queued.observe(exchange.queued_seconds)
        self.recent.note(exchange)
        decision = exchange.decision
        if first_seconds is None or decision is None or exchange.status >= 300:
            return
        if exchange.streamed:
            self.first_token.observe(first_seconds)
            if seconds is not None and exchange.events > 1:
                self.per_chunk.observe((seconds - first_seconds) / (exchange.events - 1))
        counts = self._of(decision.chosen.replica_id)
        counts.prompt_tokens += decision.prompt_tokens
        if exchange.cached_tokens is not None:
            counts.queried_tokens += decision.prompt_tokens
            counts.predicted_tokens += decision.predicted_tokens
            counts.hit_tokens += min(exchange.cached_tokens, decision.prompt_tokens)

    def retain(self, replica_ids: Collection[str]) -> None:
        """Forget the series of replicas that left the fleet."""
        for replica_id in self.replicas.keys() - set(replica_ids):
            del self.replicas[replica_id]

    def families(self) -> Iterator[Metric]:
        requests = _counter("requests", "Requests ended, by outcome", "path", "outcome", "status")
        for (path, outcome, status), count in self.requests.items():
            requests.add_metric((path, outcome, str(status or "none")), count)
        yield requests
        yield self.first_token.family(
            PREFIX + "time_to_first_token_seconds", "Streamed answers: from the request's arrival to the first byte"
        )
        yield self.per_chunk.family(
            PREFIX + "time_per_output_chunk_seconds",
            "Streamed answers: first byte to last, per event after the first (about a token each)",
        )
        yield self.whole_request.family(
            PREFIX + "e2e_request_latency_seconds", "From a request's arrival to the last byte of its answer"
        )
        yield self.queued.family(PREFIX + "request_queue_seconds", "Requests that had to wait for a place: how long")
        retries = _counter("retries", "Requests sent on to another replica")
        retries.add_metric((), self.retries)
        yield retries
        yield from self._of_replicas()
        yield from self._gauges()

    def _of(self, replica_id: str) -> ReplicaCounts:
        counts = self.replicas.get(replica_id)
        if counts is None:
            counts = self.replicas[replica_id] = ReplicaCounts()
        return counts

    def _of_replicas(self) -> Iterator[Metric]:
        decisions = _counter("decisions", "Attempts dispatched, by the reason", "replica", "policy", "reason")
        failures = _counter("replica_failures", "Attempts that a replica failed", "replica", "failure")
        prompt = _counter("prompt_tokens", "Prompt tokens of answers that began", "replica")
        queried = _counter("prefix_cache_queries", "Those of which the engine told how many it held", "replica")
        predicted = _counter("prefix_cache_predicted_hits", "Of these, predicted to be held", "replica")
        hits = _counter("prefix_cache_hits", "Of these, held as the engine counted them", "replica")
        for replica_id, counts in self.replicas.items():
            for reason, count in counts.decisions.items():
                decisions.add_metric((replica_id, *reason), count)
            for failure, count in counts.failures.items():
                failures.add_metric((replica_id, failure), count)
            prompt.add_metric((replica_id,), counts.prompt_tokens)
            queried.add_metric((replica_id,), counts.queried_tokens)
            predicted.add_metric((replica_id,), counts.predicted_tokens)
            hits.add_metric((replica_id,), counts.hit_tokens)
        yield from (decisions, failures, prompt, queried, predicted, hits)


def exposition(families: Iterable[Metric]) -> bytes:
    """In Prometheus' text format."""
    return generate_latest(_Collected(families))


class _Collected(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=labels)
