"""An answer's shape on the wire: one class per endpoint, streamed and whole.

A stream is `opening`, any number of `delta`s, then `closing`; or `failure` at any point after the opening. `whole` is
the same answer in one body.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from replica.answer import Finish, Usage
from replica.sequence import FinishReason
from shared.api import CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH, ApiError
from shared.sse import DONE, data_frame, error_frames, event_frame

__all__ = ["ChatResponse", "CompletionResponse", "MessagesResponse", "Response", "response_of"]

_ANTHROPIC_STOP = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens"}


class Response(Protocol):
    def opening(self, usage: Usage) -> bytes: ...

    def delta(self, text: str) -> bytes: ...

    def closing(self, finish: Finish, usage: Usage) -> bytes: ...

    def failure(self, error: ApiError) -> bytes: ...

    def whole(self, text: str, finish: Finish, usage: Usage) -> bytes: ...


def response_of(path: str, request_id: str, model: str, created: int, include_usage: bool) -> Response:
    """`include_usage` asks for a usage chunk at the end of an OpenAI stream; Anthropic's always carries usage."""
    if path == MESSAGES_PATH:
        return MessagesResponse(request_id, model)
    if path == CHAT_PATH:
        return ChatResponse(request_id, model, created, include_usage)
    assert path == COMPLETIONS_PATH, path
    return CompletionResponse(request_id, model, created, include_usage)


class _OpenAIResponse:
    _id_prefix: str
    _whole_object: str
    _chunk_object: str

    def __init__(self, request_id: str, model: str, created: int, include_usage: bool) -> None:
        self._head = {"id": f"{self._id_prefix}{request_id}", "created": created, "model": model}
        self._include_usage = include_usage

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        document = {**self._head, "object": self._chunk_object, "choices": choices}
        if self._include_usage:
            document["usage"] = None if usage is None else _openai_usage(usage)
        return data_frame(document)

    def _body(self, choice: dict[str, Any], usage: Usage) -> bytes:
        document = {**self._head, "object": self._whole_object, "choices": [choice], "usage": _openai_usage(usage)}
        return msgspec.json.encode(document)

    def _end(self, last_choice: dict[str, Any], usage: Usage) -> bytes:
        frames = self._chunk([last_choice])
        if self._include_usage:
            frames += self._chunk([], usage)
        return frames + DONE

    def failure(self, error: ApiError) -> bytes:
        return error_frames(error, "openai")


class ChatResponse(_OpenAIResponse):
    _id_prefix, _whole_object, _chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def opening(self, usage: Usage) -> bytes:
        return self._chunk([_chat_choice({"role": "assistant", "content": ""}, None)])

    def delta(self, text: str) -> bytes:
        return self._chunk([_chat_choice({"content": text}, None)])

    def closing(self, finish: Finish, usage: Usage) -> bytes:
        return self._end(_chat_choice({}, finish.reason.value), usage)

    def whole(self, text: str, finish: Finish, usage: Usage) -> bytes:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish.reason.value}
        return self._body(choice, usage)


class CompletionResponse(_OpenAIResponse):
    _id_prefix, _whole_object, _chunk_object = "cmpl-", "text_completion", "text_completion"

    def opening(self, usage: Usage) -> bytes:
        return self._chunk([_text_choice("", None)])

    def delta(self, text: str) -> bytes:
        return self._chunk([_text_choice(text, None)])

    def closing(self, finish: Finish, usage: Usage) -> bytes:
        return self._end(_text_choice("", finish.reason.value), usage)

    def whole(self, text: str, finish: Finish, usage: Usage) -> bytes:
        return self._body(_text_choice(text, finish.reason.value), usage)


class MessagesResponse:
    def __init__(self, request_id: str, model: str) -> None:
        self._request_id = request_id
        self._model = model

    def opening(self, usage: Usage) -> bytes:
        message = self._message([], None, _anthropic_usage(usage, output_tokens=0))
        block = {"type": "text", "text": ""}
        return (
            event_frame("message_start", {"type": "message_start", "message": message})
            + event_frame("content_block_start", {"type": "content_block_start", "index": 0, "content_block": block})
            + event_frame("ping", {"type": "ping"})
        )

    def delta(self, text: str) -> bytes:
        delta = {"type": "text_delta", "text": text}
        return event_frame("content_block_delta", {"type": "content_block_delta", "index": 0, "delta": delta})

    def closing(self, finish: Finish, usage: Usage) -> bytes:
        end = {
            "type": "message_delta",
            "delta": _anthropic_finish(finish),
            "usage": _anthropic_usage(usage, usage.completion_tokens),
        }
        return (
            event_frame("content_block_stop", {"type": "content_block_stop", "index": 0})
            + event_frame("message_delta", end)
            + event_frame("message_stop", {"type": "message_stop"})
        )

    def failure(self, error: ApiError) -> bytes:
        return error_frames(error, "anthropic", self._request_id)

    def whole(self, text: str, finish: Finish, usage: Usage) -> bytes:
        content = [{"type": "text", "text": text}]
        return msgspec.json.encode(self._message(content, finish, _anthropic_usage(usage, usage.completion_tokens)))

    def _message(self, content: list[Any], finish: Finish | None, usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **_anthropic_finish(finish),
            "usage": usage,
        }


def _chat_choice(delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _text_choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _openai_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
    }


def _anthropic_usage(usage: Usage, output_tokens: int) -> dict[str, int]:
    """Here the three kinds of input tokens add up to all of them."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": output_tokens,
    }


def _anthropic_finish(finish: Finish | None) -> dict[str, str | None]:
    if finish is None:
        return {"stop_reason": None, "stop_sequence": None}
    if finish.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_string}
    return {"stop_reason": _ANTHROPIC_STOP[finish.reason], "stop_sequence": None}
