"""Server-sent event frames, as both dialects stream them.

OpenAI: `data: <json>`, ended by `data: [DONE]`. Anthropic: `event: <type>` and `data: <json>`, ended by `message_stop`.
"""

from __future__ import annotations

import msgspec

from shared.api_errors import ApiError, Dialect

__all__ = ["DONE", "data_frame", "error_frames", "event_frame"]

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def data_frame(document: object) -> bytes:
    return b"data: " + _encode(document) + b"\n\n"


def event_frame(event: str, document: object) -> bytes:
    return b"event: " + event.encode() + b"\ndata: " + _encode(document) + b"\n\n"


def error_frames(error: ApiError, dialect: Dialect, request_id: str = "") -> bytes:
    """How a stream that has begun ends when it can not go on: the dialect's error, then the end it waits for."""
    document = error.document(dialect, request_id)
    if dialect == "anthropic":
        return event_frame("error", document)
    return data_frame(document) + DONE
