"""The replica's Prometheus metrics, in a registry of their own. Names follow the field's, with the prefix `warmroute_`.

Counters of requests are fed here; what the engine knows anyway (load, cache use, hits) is read at each scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from replica.engine_events import EngineState

__all__ = ["ReplicaMetrics"]

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
_PER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5)
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class ReplicaMetrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "warmroute_requests",
            "Requests by endpoint and outcome: ok, aborted (the client left), or the code of the error.",
            ("endpoint", "outcome"),
            registry=self._registry,
        )
        self._prompt_tokens = Counter("warmroute_prompt_tokens", "Tokens of prompts.", registry=self._registry)
        self._generation_tokens = Counter("warmroute_generation_tokens", "Tokens answered.", registry=self._registry)
        self._first_token = _histogram(
            "warmroute_time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_BUCKETS, self._registry
        )
        self._per_token = _histogram(
            "warmroute_time_per_output_token_seconds",
            "First to last token of a request, per token after the first.",
            _PER_TOKEN_BUCKETS,
            self._registry,
        )
        self._request = _histogram(
            "warmroute_e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_BUCKETS, self._registry
        )
        self._sessions = Counter(
            "warmroute_sessions",
            "Sessions saved, restored and deleted, by outcome: ok, aborted, or the code of the error.",
            ("operation", "outcome"),
            registry=self._registry,
        )
        self._session_tokens = Counter(
            "warmroute_session_tokens",
            "Tokens of sessions that were saved or restored.",
            ("operation",),
            registry=self._registry,
        )
        self._session_seconds = Histogram(
            "warmroute_session_seconds",
            "How long saving or restoring took.",
            ("operation",),
            buckets=_REQUEST_BUCKETS,
            registry=self._registry,
        )

    def watch(self, engine_state: Callable[[], EngineState], capacity_blocks: int) -> None:
        """From now on scrapes show the engine too."""
        self._registry.register(_EngineCollector(engine_state, capacity_blocks))

    def count(self, endpoint: str, outcome: str) -> None:
        self._requests.labels(endpoint, outcome).inc()

    def count_session(self, operation: str, outcome: str) -> None:
        self._sessions.labels(operation, outcome).inc()

    def observe_session(self, operation: str, seconds: float, tokens: int) -> None:
        self._session_seconds.labels(operation).observe(seconds)
        self._session_tokens.labels(operation).inc(tokens)

    def count_prompt(self, tokens: int) -> None:
        self._prompt_tokens.inc(tokens)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def observe_answer(self, seconds: float, decode_seconds: float, tokens: int) -> None:
        self._request.observe(seconds)
        self._generation_tokens.inc(tokens)
        if tokens > 1:
            self._per_token.observe(decode_seconds / (tokens - 1))

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, engine_state: Callable[[], EngineState], capacity_blocks: int) -> None:
        self._engine_state = engine_state
        self._capacity_blocks = capacity_blocks

    def collect(self) -> Iterable[Metric]:
        state = self._engine_state()
        load, counters = state.load, state.counters
        used_share = 1 - (load.free_blocks + load.evictable_blocks) / self._capacity_blocks
        gauges = (
            ("num_requests_running", "Requests in the batch.", load.running),
            ("num_requests_waiting", "Requests that wait for blocks or budget.", load.waiting),
            ("queued_prefill_tokens", "Tokens that wait to be computed.", load.queued_prefill_tokens),
            ("kv_cache_usage_ratio", "Share of KV blocks that running requests hold.", used_share),
            ("prefix_cache_blocks", "Blocks that a prompt could hit on the device.", state.held_blocks),
            ("prefix_cache_host_blocks", "Blocks that a prompt could hit in host memory.", state.host_held_blocks),
        )
        rising = (
            ("prefix_cache_queries", "Prompt tokens looked up.", counters.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found.", counters.hit_tokens),
            ("prefix_cache_block_hits", "Whole blocks found.", counters.hit_blocks),
            ("prefix_cache_copied_tokens", "Prompt tokens found in part of a block.", counters.copied_tokens),
            ("prefix_cache_onloaded_tokens", "Prompt tokens found in host memory.", counters.onloaded_tokens),
            ("num_preemptions", "Running requests sent back to wait.", counters.preemptions),
            ("computed_tokens", "Tokens computed, recomputed ones too.", counters.computed_tokens),
            ("engine_steps", "Forward passes.", state.steps),
            ("engine_failed_steps", "Forward passes that failed.", state.failed_steps),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"warmroute_{name}", text, value)
        for name, text, value in rising:
            yield CounterMetricFamily(f"warmroute_{name}", text, value)
        text = "Blocks that stopped being held where they were, by the reason."
        evictions = CounterMetricFamily("warmroute_prefix_cache_evictions", text, labels=("reason",))
        for reason, blocks in state.evictions.items():
            evictions.add_metric((reason,), blocks)
        yield evictions


def _histogram(name: str, text: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(name, text, buckets=buckets, registry=registry)
