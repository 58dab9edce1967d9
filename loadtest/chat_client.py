"""One streamed chat request and its clock readings. Blocking calls: under Locust, gevent makes them cooperative.

Every request opens its own connection, so no answer depends on who used a connection before; connecting is part of
the latency, as it is for a client that comes once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import msgspec

from loadtest.sse import EventTooLongError, SseParser
from loadtest.workloads import Message

__all__ = ["Answer", "ChatClient", "ChatRequest", "RequestFailedError"]

_PIECE_BYTES = 1 << 16
_ERROR_CHARACTERS = 200
_DONE = "[DONE]"


class RequestFailedError(Exception):
    """Refused, broken off, timed out, or answered with something else than a stream."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = True


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    messages: list[Message]
    max_tokens: int
    temperature: float = 0.0
    stream: bool = True
    stream_options: _StreamOptions = _StreamOptions()


@dataclass(slots=True)
class Answer:
    """Clock readings are `time.perf_counter()` seconds."""

    first_token_at: float = 0.0
    ended_at: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """The `x-warmroute-*` ones, by what follows that prefix."""


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class ChatClient:
    """Talks to `POST /v1/chat/completions` below `base_url`. A request may take `timeout_seconds` in all."""

    def __init__(self, base_url: str, timeout_seconds: float) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"The host must be a URL such as http://127.0.0.1:8000, not {base_url!r}.")
        self._connection = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/") + "/v1/chat/completions"
        self._timeout_seconds = timeout_seconds
        self._chunks = msgspec.json.Decoder(_Chunk)

    def ask(self, body: bytes) -> Answer:
        """Send an encoded `ChatRequest`. Raises RequestFailedError."""
        deadline = time.perf_counter() + self._timeout_seconds
        connection = self._connection(self._host, self._port, timeout=self._timeout_seconds)
        try:
            connection.request("POST", self._path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RequestFailedError(_short(response.read(_PIECE_BYTES)), response.status)
            return self._read(response, deadline)
        except TimeoutError as error:
            raise RequestFailedError(f"No complete answer within {self._timeout_seconds:g} s.") from error
        except (OSError, HTTPException, EventTooLongError, msgspec.DecodeError) as error:
            raise RequestFailedError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _read(self, response: HTTPResponse, deadline: float) -> Answer:
        answer, parser, done = Answer(), SseParser(), False
        prefix = "x-warmroute-"
        answer.headers = {
            name.lower().removeprefix(prefix): value
            for name, value in response.getheaders()
            if name.lower().startswith(prefix)
        }
        while piece := response.read1(_PIECE_BYTES):
            now = time.perf_counter()
            if now > deadline:
                raise TimeoutError
            for event in parser.feed(piece):
                if event == _DONE:
                    done = True
                else:
                    self._take(self._chunks.decode(event), answer, now)
        if not done:
            raise RequestFailedError("The stream broke off before [DONE].")
        if not answer.prompt_tokens or not answer.first_token_at:
            raise RequestFailedError("The stream ended without an answer or without usage.")
        return answer

    def _take(self, chunk: _Chunk, answer: Answer, now: float) -> None:
        if chunk.error is not None:
            raise RequestFailedError(_short(msgspec.json.encode(chunk.error)))
        for choice in chunk.choices:
            answer.text += choice.delta.content or ""
            if choice.delta.content or choice.finish_reason:
                answer.first_token_at = answer.first_token_at or now
                answer.ended_at = now
        if chunk.usage is not None:
            answer.prompt_tokens = chunk.usage.prompt_tokens
            answer.completion_tokens = chunk.usage.completion_tokens
            answer.cached_tokens = (chunk.usage.prompt_tokens_details or _Details()).cached_tokens


def _short(body: bytes) -> str:
    return " ".join(body.decode(errors="replace").split())[:_ERROR_CHARACTERS]
