"""The HTTP API of both tiers: paths, parsing, errors. The public face of the `api_*` modules.

`parse_generation` reads a whole request, for the replica; `parse_routing` decodes only what routing needs, for the
router. Both raise `ApiError`, and agree on the prompt because they derive it by the same functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.api_anthropic import MessagesRoutingShape, messages_prompt, messages_request, messages_routing
from shared.api_errors import ApiError, Dialect, dialect_of, invalid_value
from shared.api_fields import Decode, Fields, decode_object, decoder_of
from shared.api_openai import (
    ChatRoutingShape,
    CompletionRoutingShape,
    chat_prompt,
    chat_request,
    chat_routing,
    completion_prompt,
    completion_request,
    completion_routing,
)
from shared.api_request import GenerationRequest, RoutingFields
from shared.prompts import PromptInput

__all__ = [
    "CHAT_PATH",
    "COMPLETIONS_PATH",
    "COUNT_TOKENS_PATH",
    "GENERATION_PATHS",
    "MESSAGES_PATH",
    "ApiError",
    "Dialect",
    "GenerationRequest",
    "RoutingFields",
    "TokenizeRequest",
    "dialect_of",
    "parse_chat",
    "parse_completion",
    "parse_count_tokens",
    "parse_generation",
    "parse_messages",
    "parse_routing",
    "parse_tokenize",
]

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
MESSAGES_PATH = "/v1/messages"
COUNT_TOKENS_PATH = "/v1/messages/count_tokens"


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """`model` may be empty: then the only model is meant."""

    model: str
    prompt: PromptInput


@dataclass(frozen=True, slots=True)
class _Endpoint:
    decode_routing: Decode
    routing: Callable[[Fields], RoutingFields]
    request: Callable[[Fields], GenerationRequest]


_decode_all: Decode = decoder_of(dict[str, Any])
_ENDPOINTS = {
    CHAT_PATH: _Endpoint(decoder_of(ChatRoutingShape), chat_routing, chat_request),
    COMPLETIONS_PATH: _Endpoint(decoder_of(CompletionRoutingShape), completion_routing, completion_request),
    MESSAGES_PATH: _Endpoint(decoder_of(MessagesRoutingShape), messages_routing, messages_request),
}
GENERATION_PATHS = tuple(_ENDPOINTS)


def parse_routing(path: str, body: bytes) -> RoutingFields:
    """What routing needs of the body of one of GENERATION_PATHS; all else in it is skipped undecoded."""
    endpoint = _ENDPOINTS[path]
    return endpoint.routing(decode_object(endpoint.decode_routing, body))


def parse_generation(path: str, body: bytes) -> GenerationRequest:
    return _ENDPOINTS[path].request(decode_object(_decode_all, body))


def parse_chat(body: bytes) -> GenerationRequest:
    return parse_generation(CHAT_PATH, body)


def parse_completion(body: bytes) -> GenerationRequest:
    return parse_generation(COMPLETIONS_PATH, body)


def parse_messages(body: bytes) -> GenerationRequest:
    return parse_generation(MESSAGES_PATH, body)


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """A chat or completion body; only its prompt counts."""
    fields = decode_object(_decode_all, body)
    if ("messages" in fields) == ("prompt" in fields):
        raise invalid_value("messages", "or prompt is required, one of them", "missing_required_parameter")
    prompt = chat_prompt(fields) if "messages" in fields else completion_prompt(fields)
    return TokenizeRequest(fields.text("model"), prompt)


def parse_count_tokens(body: bytes) -> TokenizeRequest:
    """A messages body; `max_tokens` and all that is about the answer may be absent."""
    fields = decode_object(_decode_all, body)
    return TokenizeRequest(fields.required_text("model"), messages_prompt(fields))
