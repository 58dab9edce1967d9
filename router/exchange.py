"""One request in the router's hands, from head to last byte: what became of it, for its log line and metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from router.client_request import Response
from router.headers import safe_value
from router.placement import Decision
from router.tracing import NO_TRACE, Trace
from shared.api import GENERATION_PATHS, ApiError, dialect_of
from shared.telemetry import tell

__all__ = ["Exchange", "error_response", "route_of", "router_exhausted", "router_shutting_down"]

_logger = logging.getLogger(__name__)


class Exchange:
    """Filled in as the request goes on. `outcome` is `ok`, `client_gone`, or the code of the error it ended with."""

    __slots__ = (
        "attempts",
        "cached_tokens",
        "decision",
        "events",
        "first_byte_seconds",
        "model",
        "outcome",
        "path",
        "queued_seconds",
        "request_id",
        "seconds",
        "started_seconds",
        "status",
        "streamed",
        "trace",
    )

    def __init__(self, request_id: str, path: str, now: float, trace: Trace = NO_TRACE) -> None:
        self.request_id = request_id
        self.path = path
        self.started_seconds = now
        self.trace = trace
        self.model = ""
        self.decision: Decision | None = None
        self.queued_seconds: float | None = None
        """How long it waited for a permit; None where it got one at once."""
        self.attempts = 0
        self.first_byte_seconds: float | None = None
        """Since the start."""
        self.seconds: float | None = None
        """From the start to the last byte."""
        self.streamed = False
        """The answer was asked for in pieces."""
        self.events = 0
        """Of a streamed answer, that came."""
        self.cached_tokens: int | None = None
        self.status = 0
        self.outcome = "client_gone"

    def headers(self) -> list[tuple[str, str]]:
        """What the router says about the request in its answer."""
        headers = _request_ids(self.path, self.request_id)
        if (decision := self.decision) is not None:
            headers += [
                ("x-warmroute-replica", decision.chosen.replica_id),
                ("x-warmroute-policy", decision.policy),
                ("x-warmroute-reason", decision.reason),
                ("x-warmroute-predicted-tokens", str(decision.predicted_tokens)),
                ("x-warmroute-view", decision.ladder),
            ]
        if self.cached_tokens is not None:
            headers.append(("x-warmroute-cached-tokens", str(self.cached_tokens)))
        return headers

    @property
    def route(self) -> str:
        return route_of(self.path)

    def log(self) -> None:
        """One line, no prompts."""
        if not _logger.isEnabledFor(logging.INFO):
            return
        line: dict[str, object] = {
            "id": self.request_id,
            "path": self.path,
            "model": self.model[:100],
            "status": self.status,
            "outcome": self.outcome,
            "attempts": self.attempts,
        }
        if self.trace.trace_id:
            line["trace"] = self.trace.trace_id
        if (decision := self.decision) is not None:
            line["replica"] = decision.chosen.replica_id
            line["policy"] = decision.policy
            line["reason"] = decision.reason
            line["view"] = decision.ladder
            line["prompt_tokens"] = decision.prompt_tokens
            line["predicted_tokens"] = decision.predicted_tokens
            line["cost_seconds"] = decision.chosen.cost_seconds
        if self.cached_tokens is not None:
            line["cached_tokens"] = self.cached_tokens
        if self.queued_seconds is not None:
            line["queued_seconds"] = self.queued_seconds
        if self.first_byte_seconds is not None:
            line["first_byte_seconds"] = self.first_byte_seconds
        if self.seconds is not None:
            line["seconds"] = self.seconds
        tell(_logger, "request", line)


def route_of(path: str) -> str:
    """The path as a metric's label: only those of the API, so that clients cannot make up new ones."""
    return path if path in GENERATION_PATHS else "other"


def _request_ids(path: str, request_id: str) -> list[tuple[str, str]]:
    """The id as the headers where the path's clients look for it."""
    ids = [("x-request-id", request_id)]
    return [*ids, ("request-id", request_id)] if dialect_of(path) == "anthropic" else ids


def error_response(
    error: ApiError, path: str, request_id: str, headers: Iterable[tuple[str, str]] | None = None
) -> Response:
    """The error as the path's dialect has it; `headers` are the exchange's, if there is one."""
    said = [(name, safe_value(value)) for name, value in headers or _request_ids(path, request_id)]
    return Response(error.status, error.body(dialect_of(path), request_id), headers=[*said, *error.headers().items()])


def router_exhausted() -> ApiError:
    message = "this router has no connections to replicas left: retry later, or raise its limit of open files"
    return ApiError(503, "router_exhausted", message, retry_after_seconds=1.0)


def router_shutting_down() -> ApiError:
    message = "this router is shutting down: retry, another one may answer"
    return ApiError(503, "shutting_down", message, retry_after_seconds=1.0)
