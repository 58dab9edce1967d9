"""The one error type of both tiers, and its body in either dialect.

Whatever goes wrong becomes an `ApiError`: an HTTP status, a stable `code` for programs, and a message that tells a
person what to do. Paths under `/v1/messages` speak Anthropic's error object, all others OpenAI's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

__all__ = [
    "ApiError",
    "Dialect",
    "body_ended_early",
    "body_too_large",
    "cache_precondition_failed",
    "context_length_exceeded",
    "dialect_of",
    "engine_full",
    "expectation_failed",
    "internal_error",
    "invalid_value",
    "method_not_allowed",
    "model_not_found",
    "not_ready",
    "path_not_found",
    "shutting_down",
    "unsupported",
    "version_not_supported",
]

Dialect = Literal["openai", "anthropic"]

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """`param` is the path of the offending field (`messages[2].content`)."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: float | None = None,
        allow: str | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds
        self.allow = allow
        self.cached_tokens = cached_tokens

    def type(self, dialect: Dialect) -> str:
        """The dialect's own class of error, which its official client turns into an exception class."""
        if dialect == "anthropic":
            return _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return _OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_seconds is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_seconds)))
        if self.allow is not None:
            headers["Allow"] = self.allow
        if self.cached_tokens is not None:
            headers["x-warmroute-cached-tokens"] = str(self.cached_tokens)
        return headers

    def document(self, dialect: Dialect, request_id: str = "") -> dict[str, object]:
        """The error object as the dialect's clients expect it; `code` and `param` are in both."""
        error: dict[str, object] = {
            "message": self.message,
            "type": self.type(dialect),
            "param": self.param,
            "code": self.code,
        }
        if self.cached_tokens is not None:
            error["cached_tokens"] = self.cached_tokens
        if dialect == "anthropic":
            return {"type": "error", "error": error, "request_id": request_id or None}
        return {"error": error}

    def body(self, dialect: Dialect, request_id: str = "") -> bytes:
        return msgspec.json.encode(self.document(dialect, request_id))


def dialect_of(path: str) -> Dialect:
    return "anthropic" if path == "/v1/messages" or path.startswith("/v1/messages/") else "openai"


def invalid_value(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """`message` follows the field's name: `invalid_value("top_p", "must be above 0")`."""
    return ApiError(400, code, f"{param} {message}", param=param)


def unsupported(param: str, advice: str = "leave it out") -> ApiError:
    return ApiError(400, "unsupported_parameter", f"{param} is not supported with this value: {advice}", param=param)


def model_not_found(model: str, known: Iterable[str]) -> ApiError:
    served = ", ".join(sorted(known)) or "none yet"
    return ApiError(
        404, "model_not_found", f"model {model[:200]!r} is not served here; served: {served}", param="model"
    )


def context_length_exceeded(prompt_tokens: int, context_tokens: int, max_tokens: int | None = None) -> ApiError:
    wanted = f"the prompt has {prompt_tokens} tokens"
    if max_tokens is not None:
        wanted += f" and max_tokens asks for {max_tokens} more"
    message = f"this model's context is {context_tokens} tokens, but {wanted}: send less or lower max_tokens"
    return ApiError(400, "context_length_exceeded", message, param="messages")


def body_ended_early() -> ApiError:
    return ApiError(400, "invalid_body", "the request body ended before its length: send it again")


def body_too_large(limit_bytes: int) -> ApiError:
    return ApiError(413, "request_too_large", f"the request body is over the limit of {limit_bytes} bytes: send less")


def path_not_found(path: str) -> ApiError:
    return ApiError(404, "path_not_found", f"there is no {path[:200]!r} here: see the paths in the README")


def method_not_allowed(method: str, allowed: Iterable[str]) -> ApiError:
    allow = ", ".join(sorted(allowed))
    return ApiError(405, "method_not_allowed", f"{method[:20]} is not allowed here: use {allow}", allow=allow)


def cache_precondition_failed(cached_tokens: int) -> ApiError:
    """For a router's eyes: it expected more of the prompt in this replica's cache than there is."""
    message = (
        f"this replica's cache holds {cached_tokens} tokens of the prompt, much less than expected: "
        "send it to another, or leave x-warmroute-expect-cached-tokens out"
    )
    return ApiError(412, "cache_precondition_failed", message, cached_tokens=cached_tokens)


def expectation_failed() -> ApiError:
    return ApiError(417, "expectation_failed", "of the Expect header only 100-continue is understood: leave it out")


def engine_full(retry_after_seconds: float = 1.0) -> ApiError:
    message = "too many requests are waiting: retry after the given time"
    return ApiError(429, "engine_full", message, retry_after_seconds=retry_after_seconds)


def not_ready(message: str, retry_after_seconds: float = 2.0) -> ApiError:
    return ApiError(503, "not_ready", message, retry_after_seconds=retry_after_seconds)


def shutting_down() -> ApiError:
    return not_ready("this replica is shutting down: send the request to another")


def version_not_supported() -> ApiError:
    return ApiError(505, "invalid_http", "only HTTP/1.1 and HTTP/1.0 are spoken here: use one of them")


def internal_error(message: str = "the server failed on this request: its log says why") -> ApiError:
    return ApiError(500, "internal_error", message)
