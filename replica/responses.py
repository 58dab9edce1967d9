"""Answers' shape on the wire: one class per endpoint, streamed and whole.

A stream is `opening`, any number of `delta`s, then `closing`; or `failure` at any point after the opening. `whole` is
the same answers in one body. Where a request has several, their parts come as they grow, each with its index.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from replica.answer import Finish, Part, ShownToken, Usage
from replica.logprob_shapes import BytesOf, chat_logprobs, completion_logprobs
from replica.sequence import FinishReason
from shared.api import CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH, ApiError, GenerationRequest
from shared.sse import DONE, data_frame, error_frames, event_frame

__all__ = ["ChatResponse", "CompletionResponse", "Head", "MessagesResponse", "Response", "response_of"]

_ANTHROPIC_STOP = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens"}


@dataclass(frozen=True, slots=True)
class Head:
    """What stands at the beginning of every answer."""

    request_id: str
    model: str
    created: int


class Response(Protocol):
    def opening(self, usage: Usage) -> bytes: ...

    def delta(self, part: Part, usage: Usage) -> bytes:
        """Empty where there is nothing to tell."""
        ...

    def closing(self, usage: Usage) -> bytes: ...

    def failure(self, error: ApiError) -> bytes: ...

    def whole(self, answers: Items[Part], usage: Usage) -> bytes:
        """`answers` are all there is, one for each index."""
        ...


def response_of(path: str, head: Head, request: GenerationRequest, bytes_of: BytesOf) -> Response:
    if path == MESSAGES_PATH:
        return MessagesResponse(head)
    if path == CHAT_PATH:
        return ChatResponse(head, request, bytes_of)
    assert path == COMPLETIONS_PATH, path
    return CompletionResponse(head, request, bytes_of)


class _OpenAIResponse:
    _id_prefix: str
    _whole_object: str
    _chunk_object: str

    def __init__(self, head: Head, request: GenerationRequest, bytes_of: BytesOf) -> None:
        self._head = {"id": f"{self._id_prefix}{head.request_id}", "created": head.created, "model": head.model}
        self._count = request.n
        self._include_usage = request.include_usage
        self._tells_logprobs = request.top_logprobs is not None
        self._bytes_of = bytes_of

    def opening(self, usage: Usage) -> bytes:
        return b"".join([self._chunk([self._beginning(index)]) for index in range(self._count)])

    def delta(self, part: Part, usage: Usage) -> bytes:
        frames = self._chunk([self._piece(part)]) if part.text or part.tokens else b""
        if part.finish is not None:
            frames += self._chunk([self._end(part.index, part.finish)])
        return frames

    def closing(self, usage: Usage) -> bytes:
        return (self._chunk([], usage) if self._include_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        return error_frames(error, "openai")

    def whole(self, answers: Items[Part], usage: Usage) -> bytes:
        choices = [self._whole(part, part.finish) for part in answers if part.finish is not None]
        document = {**self._head, "object": self._whole_object, "choices": choices, "usage": _openai_usage(usage)}
        return msgspec.json.encode(document)

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        document = {**self._head, "object": self._chunk_object, "choices": choices}
        if self._include_usage:
            document["usage"] = None if usage is None else _openai_usage(usage)
        return data_frame(document)

    def _beginning(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def _piece(self, part: Part) -> dict[str, Any]:
        raise NotImplementedError

    def _end(self, index: int, finish: Finish) -> dict[str, Any]:
        raise NotImplementedError

    def _whole(self, part: Part, finish: Finish) -> dict[str, Any]:
        raise NotImplementedError


class ChatResponse(_OpenAIResponse):
    _id_prefix, _whole_object, _chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _beginning(self, index: int) -> dict[str, Any]:
        return self._choice(index, {"role": "assistant", "content": ""})

    def _piece(self, part: Part) -> dict[str, Any]:
        return self._choice(part.index, {"content": part.text}, logprobs=self._logprobs(part.tokens))

    def _end(self, index: int, finish: Finish) -> dict[str, Any]:
        return self._choice(index, {}, finish.reason.value)

    def _whole(self, part: Part, finish: Finish) -> dict[str, Any]:
        message = {"role": "assistant", "content": part.text, "refusal": None}
        logprobs = self._logprobs(part.tokens)
        return {"index": part.index, "message": message, "logprobs": logprobs, "finish_reason": finish.reason.value}

    def _choice(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, tokens: Items[ShownToken]) -> dict[str, Any] | None:
        return chat_logprobs(tokens, self._bytes_of) if self._tells_logprobs else None


class CompletionResponse(_OpenAIResponse):
    _id_prefix, _whole_object, _chunk_object = "cmpl-", "text_completion", "text_completion"

    def _beginning(self, index: int) -> dict[str, Any]:
        return self._choice(index, "")

    def _piece(self, part: Part) -> dict[str, Any]:
        return self._choice(part.index, part.text, tokens=part.tokens)

    def _end(self, index: int, finish: Finish) -> dict[str, Any]:
        return self._choice(index, "", finish.reason.value)

    def _whole(self, part: Part, finish: Finish) -> dict[str, Any]:
        return self._choice(part.index, part.text, finish.reason.value, part.tokens)

    def _choice(
        self, index: int, text: str, finish_reason: str | None = None, tokens: Items[ShownToken] | None = None
    ) -> dict[str, Any]:
        told = self._tells_logprobs and tokens is not None
        logprobs = completion_logprobs(tokens or (), self._bytes_of) if told else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class MessagesResponse:
    """A request has one answer here, and log probabilities are not told."""

    def __init__(self, head: Head) -> None:
        self._request_id = head.request_id
        self._model = head.model

    def opening(self, usage: Usage) -> bytes:
        message = self._message([], None, _anthropic_usage(usage, output_tokens=0))
        block = {"type": "text", "text": ""}
        return (
            event_frame("message_start", {"type": "message_start", "message": message})
            + event_frame("content_block_start", {"type": "content_block_start", "index": 0, "content_block": block})
            + event_frame("ping", {"type": "ping"})
        )

    def delta(self, part: Part, usage: Usage) -> bytes:
        frames = b""
        if part.text:
            delta = {"type": "text_delta", "text": part.text}
            frames = event_frame("content_block_delta", {"type": "content_block_delta", "index": 0, "delta": delta})
        if part.finish is not None:
            end = {
                "type": "message_delta",
                "delta": _anthropic_finish(part.finish),
                "usage": _anthropic_usage(usage, usage.completion_tokens),
            }
            frames += event_frame("content_block_stop", {"type": "content_block_stop", "index": 0})
            frames += event_frame("message_delta", end)
        return frames

    def closing(self, usage: Usage) -> bytes:
        return event_frame("message_stop", {"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        return error_frames(error, "anthropic", self._request_id)

    def whole(self, answers: Items[Part], usage: Usage) -> bytes:
        [answer] = answers
        content = [{"type": "text", "text": answer.text}]
        message = self._message(content, answer.finish, _anthropic_usage(usage, usage.completion_tokens))
        return msgspec.json.encode(message)

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
