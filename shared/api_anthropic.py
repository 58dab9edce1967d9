"""Anthropic's dialect: messages, rendered by the same chat templates as OpenAI's.

system                 -> one system message in front
text blocks            -> content of one string
tool_use blocks        -> the assistant message's tool_calls
tool_result blocks     -> tool messages, before what else the user says
last message assistant -> the answer continues it
max_tokens 0           -> the prompt is computed for the cache, and nothing answered
"""

from __future__ import annotations

from typing import Any, TypedDict

from shared.api_errors import invalid_value, unsupported
from shared.api_fields import Fields
from shared.api_request import (
    MOST_TOKENS,
    GenerationRequest,
    RoutingFields,
    most_likely,
    nucleus,
    stop_strings,
    stop_token_ids,
)
from shared.cache_wishes import anthropic_keep_seconds
from shared.prompts import ChatPrompt

__all__ = ["MessagesRoutingShape", "messages_prompt", "messages_request", "messages_routing"]

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "thinking": ({"type": "disabled"},),
    "output_config": ({},),
    "output_format": (),
    "mcp_servers": ([],),
    "container": (),
    "context_management": (),
}


class MessagesRoutingShape(TypedDict, total=False):
    """The fields that routing reads; a decoder of this shape skips all others."""

    model: Any
    messages: Any
    system: Any
    tools: Any
    tool_choice: Any
    stream: Any
    max_tokens: Any
    metadata: Any


def messages_routing(fields: Fields) -> RoutingFields:
    fields.required("max_tokens")
    return RoutingFields(
        model=fields.required_text("model"),
        prompt=messages_prompt(fields),
        stream=fields.flag("stream"),
        max_tokens=fields.integer("max_tokens", 0, MOST_TOKENS),
        session="",
        user=fields.nested("metadata").text("user_id"),
    )


def messages_request(fields: Fields) -> GenerationRequest:
    fields.refuse_unless_neutral(_NEUTRAL)
    return GenerationRequest(
        routing=messages_routing(fields),
        include_usage=True,
        temperature=fields.number("temperature", 0, 1, default=1.0),
        top_p=nucleus(fields),
        top_k=most_likely(fields),
        seed=None,
        stop=_stop_sequences(fields),
        stop_token_ids=stop_token_ids(fields),
        ignore_eos=fields.flag("ignore_eos"),
        keep_seconds=anthropic_keep_seconds(fields),
    )


def _stop_sequences(fields: Fields) -> tuple[str, ...]:
    if isinstance(fields.raw("stop_sequences"), str):
        raise invalid_value("stop_sequences", "must be a list of strings, not a string", "invalid_type")
    return stop_strings(fields, "stop_sequences")


def messages_prompt(fields: Fields) -> ChatPrompt:
    fields.required("messages")
    turns = fields.objects("messages")
    if not turns:
        raise invalid_value("messages", "must not be empty")
    messages: list[dict[str, Any]] = []
    system = _text(fields, "system")
    if system:
        messages.append({"role": "system", "content": system})
    for index, turn in enumerate(turns):
        messages += _turn(Fields(turn, f"messages[{index}]"))
    continues = messages[-1]["role"] == "assistant"
    return ChatPrompt(
        messages=messages,
        tools=_tools(fields),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        template_kwargs={},
    )


def _turn(turn: Fields) -> list[dict[str, Any]]:
    role = turn.raw("role")
    if role not in ("user", "assistant"):
        raise invalid_value(turn.path("role"), 'must be "user" or "assistant"; system text goes into system')
    content = turn.required("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    return _assistant_turn(turn) if role == "assistant" else _user_turn(turn)


def _user_turn(turn: Fields) -> list[dict[str, Any]]:
    results, texts = [], []
    for block in _blocks(turn, "content"):
        if block.raw("type") == "tool_result":
            text = _text(block, "content")
            results.append({"role": "tool", "tool_call_id": block.required_text("tool_use_id"), "content": text})
        else:
            texts.append(_block_text(block))
    if texts or not results:
        return [*results, {"role": "user", "content": "".join(texts)}]
    return results


def _assistant_turn(turn: Fields) -> list[dict[str, Any]]:
    calls, texts = [], []
    for block in _blocks(turn, "content"):
        if block.raw("type") == "tool_use":
            function = {"name": block.required_text("name"), "arguments": block.mapping("input")}
            calls.append({"id": block.required_text("id"), "type": "function", "function": function})
        else:
            texts.append(_block_text(block))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    return [message]


def _text(fields: Fields, name: str) -> str:
    """A string, or text blocks joined; absent is empty."""
    value = fields.raw(name)
    if value is None or isinstance(value, str):
        return value or ""
    return "".join(_block_text(block) for block in _blocks(fields, name))


def _blocks(fields: Fields, name: str) -> list[Fields]:
    return [Fields(block, f"{fields.path(name)}[{index}]") for index, block in enumerate(fields.objects(name))]


def _block_text(block: Fields) -> str:
    if block.required_text("type") != "text":
        raise unsupported(block.path("type"), "only text, tool_use and tool_result blocks are understood")
    block.required("text")
    return block.text("text")


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
    choice = fields.nested("tool_choice").text("type", "auto")
    if choice not in ("auto", "none"):
        raise unsupported("tool_choice.type", 'send "auto" or "none"')
    tools = [_tool(tool) for tool in _blocks(fields, "tools")]
    return tools if tools and choice == "auto" else None


def _tool(tool: Fields) -> dict[str, Any]:
    if tool.text("type", "custom") != "custom":
        raise unsupported(tool.path("type"), "server tools are not run here")
    function = {
        "name": tool.required_text("name"),
        "description": tool.text("description"),
        "parameters": tool.mapping("input_schema"),
    }
    return {"type": "function", "function": function}
