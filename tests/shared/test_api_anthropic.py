"""Anthropic's bodies: how they become the same prompts, and how refusals name their field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shared.api import MESSAGES_PATH, ApiError, parse_messages, parse_routing
from shared.prompts import ChatPrompt

HELLO = [{"role": "user", "content": "hello"}]


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", "max_tokens": 5, "messages": HELLO} | fields)


def prompt(**fields: Any) -> ChatPrompt:
    parsed = parse_messages(body(**fields)).routing.prompt
    assert isinstance(parsed, ChatPrompt)
    return parsed


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        parse_messages(body(**fields))
    assert raised.value.status == 400
    return raised.value


def test_every_supported_field_arrives() -> None:
    request = parse_messages(
        body(stream=True, temperature=0.5, top_p=0.9, top_k=4, stop_sequences=["END"], metadata={"user_id": "u"})
    )
    assert (request.routing.stream, request.routing.max_tokens, request.routing.user) == (True, 5, "u")
    assert (request.temperature, request.top_p, request.top_k, request.stop) == (0.5, 0.9, 4, ("END",))


def test_no_tokens_at_all_warm_the_cache() -> None:
    assert parse_messages(body(max_tokens=0)).routing.max_tokens == 0


@pytest.mark.parametrize("system", ["be brief", [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]])
def test_the_system_field_becomes_the_first_message(system: object) -> None:
    assert prompt(system=system).messages == [{"role": "system", "content": "be brief"}, *HELLO]


def test_text_blocks_are_joined_and_cache_breakpoints_change_nothing() -> None:
    blocks = [{"type": "text", "text": "hel", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "lo"}]
    assert prompt(messages=[{"role": "user", "content": blocks}]).messages == HELLO


def test_tool_use_and_its_result_become_a_call_and_a_tool_message() -> None:
    use = [{"type": "text", "text": "look"}, {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}]
    result = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]},
        {"type": "text", "text": "and?"},
    ]
    messages = prompt(messages=[{"role": "assistant", "content": use}, {"role": "user", "content": result}]).messages
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert messages == [
        {"role": "assistant", "content": "look", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "42"},
        {"role": "user", "content": "and?"},
    ]


def test_tools_are_offered_in_openai_shape_unless_the_choice_is_none() -> None:
    tools = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert prompt(tools=tools).tools == [{"type": "function", "function": function}]
    assert prompt(tools=tools, tool_choice={"type": "none"}).tools is None


def test_an_assistant_message_at_the_end_is_continued() -> None:
    started = prompt(messages=[*HELLO, {"role": "assistant", "content": "Well,"}])
    assert (started.add_generation_prompt, started.continue_final_message) == (False, True)


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("max_tokens", None, "max_tokens"),
        ("max_tokens", -1, "max_tokens"),
        ("max_tokens", "5", "max_tokens"),
        ("temperature", 1.5, "temperature"),
        ("stop_sequences", [""], "stop_sequences"),
        ("stop_sequences", "x", "stop_sequences"),
        ("thinking", {"type": "enabled", "budget_tokens": 1024}, "thinking"),
        ("mcp_servers", [{}], "mcp_servers"),
        ("metadata", [], "metadata"),
        ("system", 5, "system"),
        ("system", [{"type": "image"}], "system[0].type"),
        ("tool_choice", {"type": "any"}, "tool_choice.type"),
        ("tools", [{"type": "web_search_20250305", "name": "w"}], "tools[0].type"),
        ("tools", [{"description": "nameless"}], "tools[0].name"),
        ("messages", [], "messages"),
        ("messages", [{"role": "system", "content": "x"}], "messages[0].role"),
        ("messages", [{"role": "user"}], "messages[0].content"),
        ("messages", [{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0].type"),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ],
)
def test_a_wrong_field_is_named_with_its_path(field: str, value: object, param: str) -> None:
    error = refusal(**{field: value})
    assert error.param == param
    assert error.message.startswith(param)


def test_routing_agrees_with_the_replica() -> None:
    sent = body(stream=True, system="be brief", metadata={"user_id": "u"})
    assert parse_routing(MESSAGES_PATH, sent) == parse_messages(sent).routing
