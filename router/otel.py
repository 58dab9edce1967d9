"""Spans for OpenTelemetry: one `warmroute.request` for each request, with the decision as its attributes.

Only where OTEL_EXPORTER_OTLP_ENDPOINT (or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) is set is anything of it imported. The
SDK reads its own settings: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_BSP_* and so on. Spans leave by its thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from router.client_request import ClientRequest
from router.exchange import Exchange
from router.tracing import TRACEPARENT, TRACESTATE, Trace, parent_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

__all__ = ["OtelTracer", "tracer_from"]

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_LAST_WORDS_SECONDS = 2.0
_FAILED = 500

_logger = logging.getLogger(__name__)


def tracer_from(environment: Mapping[str, str]) -> OtelTracer | None:
    """None where nobody is to be told, or where it cannot be: then the log says what to install."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or not any(map(environment.get, _ENDPOINTS)):
        return None
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if next(filter(None, map(environment.get, _PROTOCOLS)), "").lower() == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        _logger.warning("no traces are sent (%s): pip install 'warmroute[otel]', or unset %s", error, _ENDPOINTS[1])
        return None
    named = "OTEL_SERVICE_NAME" in environment or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(resource=Resource.create({} if named else {SERVICE_NAME: "warmroute-router"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OtelTracer(provider)


class OtelTracer:
    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("warmroute.router")

    def begin(self, request: ClientRequest) -> Trace:
        from opentelemetry import trace

        parent = parent_of(request)
        context: Context | None = None
        if parent is not None:
            remote = trace.SpanContext(
                int(parent.trace_id, 16), int(parent.span_id, 16), True, trace.TraceFlags(parent.flags)
            )
            context = trace.set_span_in_context(trace.NonRecordingSpan(remote))
        span = self._tracer.start_span("warmroute.request", context, trace.SpanKind.SERVER)
        return _OtelTrace(span, keeps_state=parent is not None)

    def close(self) -> None:
        """Send what is left, within two seconds."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_LAST_WORDS_SECONDS)


class _OtelTrace(Trace):
    __slots__ = ("_span",)

    def __init__(self, span: Span, *, keeps_state: bool) -> None:
        own = span.get_span_context()
        trace_id = f"{own.trace_id:032x}"
        line = f"traceparent: 00-{trace_id}-{own.span_id:016x}-{own.trace_flags:02x}\r\n"
        super().__init__(trace_id, _PARENT_ONLY if keeps_state else _BOTH, line.encode())
        self._span = span

    def end(self, exchange: Exchange) -> None:
        from opentelemetry.trace import StatusCode

        span = self._span
        if span.is_recording():
            span.set_attributes({name: value for name, value in _attributes(exchange).items() if value is not None})
            if exchange.status >= _FAILED or exchange.outcome == "replica_broke_off":
                span.set_status(StatusCode.ERROR)
        span.end()


_PARENT_ONLY, _BOTH = frozenset({TRACEPARENT}), frozenset({TRACEPARENT, TRACESTATE})


def _attributes(exchange: Exchange) -> dict[str, Any]:
    about: dict[str, Any] = {
        "url.path": exchange.route,
        "http.response.status_code": exchange.status or None,
        "gen_ai.request.model": exchange.model[:100] or None,
        "warmroute.request_id": exchange.request_id,
        "warmroute.outcome": exchange.outcome,
        "warmroute.attempts": exchange.attempts,
        "warmroute.cached_tokens": exchange.cached_tokens,
        "warmroute.first_byte_seconds": exchange.first_byte_seconds,
    }
    if (decision := exchange.decision) is not None:
        about |= {
            "gen_ai.usage.input_tokens": decision.prompt_tokens,
            "warmroute.replica": decision.chosen.replica_id,
            "warmroute.policy": decision.policy,
            "warmroute.reason": decision.reason,
            "warmroute.view": decision.ladder,
            "warmroute.predicted_tokens": decision.predicted_tokens,
        }
    return about
