"""One error, told in the dialect of the path."""

from __future__ import annotations

import json

import pytest

from shared.api_errors import ApiError, dialect_of, engine_full, method_not_allowed
from shared.sse import error_frames


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/messages", "anthropic"),
        ("/v1/messages/count_tokens", "anthropic"),
        ("/v1/messagesx", "openai"),
        ("/v1/chat/completions", "openai"),
        ("/", "openai"),
    ],
)
def test_the_path_decides_the_dialect(path: str, dialect: str) -> None:
    assert dialect_of(path) == dialect


def test_openais_error_object() -> None:
    error = ApiError(400, "invalid_value", "top_p must be above 0", param="top_p")
    assert json.loads(error.body("openai")) == {
        "error": {
            "message": "top_p must be above 0",
            "type": "invalid_request_error",
            "param": "top_p",
            "code": "invalid_value",
        }
    }


def test_anthropics_error_object() -> None:
    document = json.loads(ApiError(404, "model_not_found", "no such model").body("anthropic", "req-1"))
    assert document["type"] == "error"
    assert document["request_id"] == "req-1"
    assert document["error"]["type"] == "not_found_error"
    assert document["error"]["message"] == "no such model"


def test_refusals_say_when_to_retry_and_what_is_allowed() -> None:
    assert engine_full(0.2).headers() == {"Retry-After": "1"}
    assert engine_full(2.5).headers() == {"Retry-After": "3"}
    assert method_not_allowed("PUT", {"POST", "GET"}).headers() == {"Allow": "GET, POST"}


def test_a_broken_stream_ends_as_its_dialect_expects() -> None:
    error = ApiError(500, "internal_error", "broken")
    assert error_frames(error, "openai").endswith(b'"code":"internal_error"}}\n\ndata: [DONE]\n\n')
    assert error_frames(error, "anthropic").startswith(b'event: error\ndata: {"type":"error"')
