"""OpenAI's dialect: chat completions and completions, in and out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import msgspec

from shared.api_errors import invalid_value, unsupported
from shared.api_fields import Fields
from shared.api_request import (
    MOST_TOKENS,
    GenerationRequest,
    RoutingFields,
    agreed,
    logit_bias,
    most_likely,
    nucleus,
    sampling_seed,
    stop_strings,
    stop_token_ids,
)
from shared.cache_wishes import openai_keep_seconds
from shared.prompts import ChatPrompt, PromptInput, TextPrompt, TokenPrompt

__all__ = [
    "ChatRoutingShape",
    "CompletionRoutingShape",
    "chat_prompt",
    "chat_request",
    "chat_routing",
    "completion_prompt",
    "completion_request",
    "completion_routing",
]

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_PLAIN_MESSAGE = frozenset({"role", "content"})
_PLAIN_ROLES = _ROLES - {"developer"}
_PLAIN_CHAT = frozenset({"model", "messages", "stream", "max_tokens"})
_MOST_CHOICES = 128
_MOST_LOGPROBS = 20

# Fields of either endpoint that change the answer and are not built, with the values that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "typical_p": (1,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "echo": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
_CHAT_NEUTRAL = _NEUTRAL | {
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "chat_template": (),
    "documents": ([],),
    "add_special_tokens": (False,),
}
_COMPLETION_NEUTRAL = _NEUTRAL | {"suffix": ("",), "add_special_tokens": (True,)}
_STREAM_NEUTRAL: dict[str, tuple[object, ...]] = {"continuous_usage_stats": (False,)}


class _RoutingShape(TypedDict, total=False):
    model: Any
    stream: Any
    max_tokens: Any
    user: Any
    prompt_cache_key: Any


class ChatRoutingShape(_RoutingShape, total=False):
    """The fields that routing reads; a decoder of this shape skips all others."""

    messages: Any
    tools: Any
    tool_choice: Any
    max_completion_tokens: Any
    add_generation_prompt: Any
    continue_final_message: Any
    chat_template_kwargs: Any


class CompletionRoutingShape(_RoutingShape, total=False):
    prompt: Any


def chat_routing(fields: Fields) -> RoutingFields:
    return _plain_chat_routing(fields.values) or RoutingFields(
        model=fields.required_text("model"),
        prompt=chat_prompt(fields),
        stream=fields.flag("stream"),
        max_tokens=agreed(fields, "max_tokens", "max_completion_tokens"),
        session=fields.text("prompt_cache_key"),
        user=fields.text("user"),
    )


def _plain_chat_routing(values: Mapping[str, Any]) -> RoutingFields | None:
    """The same for most requests, in a fraction of the time; None where something is to be looked at, or wrong."""
    if not values.keys() <= _PLAIN_CHAT:
        return None
    model, messages = values.get("model"), values.get("messages")
    stream, max_tokens = values.get("stream", False), values.get("max_tokens")
    if type(model) is not str or not model or type(messages) is not list or not messages or type(stream) is not bool:
        return None
    if max_tokens is not None and (type(max_tokens) is not int or not 1 <= max_tokens <= MOST_TOKENS):
        return None
    for message in messages:
        if type(message) is not dict or message.keys() != _PLAIN_MESSAGE or type(message["content"]) is not str:
            return None
        if type(message["role"]) is not str or message["role"] not in _PLAIN_ROLES:
            return None
    return RoutingFields(model, ChatPrompt(messages), stream, max_tokens, "", "")


def completion_routing(fields: Fields) -> RoutingFields:
    return RoutingFields(
        model=fields.required_text("model"),
        prompt=completion_prompt(fields),
        stream=fields.flag("stream"),
        max_tokens=fields.integer("max_tokens", 0, MOST_TOKENS),
        session=fields.text("prompt_cache_key"),
        user=fields.text("user"),
    )


def chat_request(fields: Fields) -> GenerationRequest:
    fields.refuse_unless_neutral(_CHAT_NEUTRAL)
    return _request(fields, chat_routing(fields), _chat_logprobs(fields))


def completion_request(fields: Fields) -> GenerationRequest:
    fields.refuse_unless_neutral(_COMPLETION_NEUTRAL)
    return _request(fields, completion_routing(fields), fields.integer("logprobs", 0, _MOST_LOGPROBS))


def _chat_logprobs(fields: Fields) -> int | None:
    wanted, likeliest = fields.flag("logprobs"), fields.integer("top_logprobs", 0, _MOST_LOGPROBS)
    if likeliest and not wanted:
        raise invalid_value("top_logprobs", "is only allowed together with logprobs: true")
    return likeliest or 0 if wanted else None


def _request(fields: Fields, routing: RoutingFields, top_logprobs: int | None) -> GenerationRequest:
    stream_options = fields.nested("stream_options")
    stream_options.refuse_unless_neutral(_STREAM_NEUTRAL)
    include_usage = stream_options.flag("include_usage")
    if "stream_options" in fields and not routing.stream:
        raise invalid_value("stream_options", "is only allowed together with stream: true")
    return GenerationRequest(
        routing=routing,
        include_usage=include_usage,
        temperature=fields.number("temperature", 0, 2, default=1.0),
        top_p=nucleus(fields),
        top_k=most_likely(fields),
        seed=sampling_seed(fields),
        stop=stop_strings(fields, "stop"),
        stop_token_ids=stop_token_ids(fields),
        ignore_eos=fields.flag("ignore_eos"),
        n=fields.integer("n", 1, _MOST_CHOICES) or 1,
        min_p=fields.number("min_p", 0, 1, default=0.0),
        repetition_penalty=fields.number("repetition_penalty", 0.01, 100, default=1.0),
        presence_penalty=fields.number("presence_penalty", -2, 2, default=0.0),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, default=0.0),
        logit_bias=logit_bias(fields),
        top_logprobs=top_logprobs,
        keep_seconds=openai_keep_seconds(fields),
    )


def completion_prompt(fields: Fields) -> PromptInput:
    """A string, a list of token ids, or a list that holds exactly one of either."""
    prompt = fields.required("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise unsupported("prompt", "send one request for each prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if isinstance(prompt, list):
        return TokenPrompt(Fields({"prompt": prompt}).token_ids("prompt"))
    raise invalid_value("prompt", "must be a string or a list of token ids", "invalid_type")


def chat_prompt(fields: Fields) -> ChatPrompt:
    fields.required("messages")
    messages = fields.objects("messages")
    if not messages:
        raise invalid_value("messages", "must not be empty")
    continue_final = fields.flag("continue_final_message")
    add_generation = fields.flag("add_generation_prompt", default=not continue_final)
    if continue_final and add_generation:
        raise invalid_value("add_generation_prompt", "must be false when continue_final_message is true")
    tools, offered = fields.objects("tools"), _tools_offered(fields)
    return ChatPrompt(
        messages=[_message(message, index) for index, message in enumerate(messages)],
        tools=tools if tools and offered else None,
        add_generation_prompt=add_generation,
        continue_final_message=continue_final,
        template_kwargs=fields.mapping("chat_template_kwargs"),
    )


def _tools_offered(fields: Fields) -> bool:
    choice = fields.raw("tool_choice")
    if choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", 'send "auto" or "none"')
    return bool(choice != "none")


def _message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """The message as a chat template expects it: content one string, no null fields, tool arguments as objects."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        allowed = ", ".join(sorted(_ROLES))
        raise invalid_value(f"messages[{index}].role", f"must be one of {allowed}")
    if isinstance(content, str) and role != "developer" and message.keys() == _PLAIN_MESSAGE:
        return message
    fields = Fields(message, f"messages[{index}]")
    fields.refuse_unless_neutral({"function_call": (), "audio": ()})
    plain = {name: value for name, value in message.items() if value is not None}
    plain["role"] = "system" if role == "developer" else role
    plain["content"] = _content(fields)
    if "tool_calls" in fields:
        plain["tool_calls"] = [
            _tool_call(Fields(call, f"{fields.path('tool_calls')}[{number}]"), call)
            for number, call in enumerate(fields.objects("tool_calls"))
        ]
    elif content is None and role != "assistant":
        raise invalid_value(fields.path("content"), "is required", "missing_required_parameter")
    return plain


def _content(fields: Fields) -> str:
    content = fields.raw("content")
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(fields.objects("content")):
        part_fields = Fields(part, f"{fields.path('content')}[{index}]")
        kind = part_fields.required_text("type")
        if kind not in ("text", "refusal"):
            raise unsupported(part_fields.path("type"), "only text parts are understood")
        part_fields.required(kind)
        texts.append(part_fields.text(kind))
    return "".join(texts)


def _tool_call(fields: Fields, call: dict[str, Any]) -> dict[str, Any]:
    function = fields.nested("function")
    name, arguments = function.required_text("name"), function.raw("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            raise invalid_value(function.path("arguments"), "must be a JSON object, spelled as a string") from None
    if arguments is not None and not isinstance(arguments, dict):
        raise invalid_value(function.path("arguments"), "must be a JSON object")
    return call | {"function": {"name": name, "arguments": arguments or {}}}
