from __future__ import annotations

import json
from typing import Any

import pytest

from shared.api import CHAT_PATH, MESSAGES_PATH, ApiError, parse_generation

USER = {"role": "user", "content": "hello"}


def openai(**fields: Any) -> float:
    body = {"model": "tiny", "messages": [USER]} | fields
    return parse_generation(CHAT_PATH, json.dumps(body).encode()).keep_seconds


def anthropic(**fields: Any) -> float:
    body = {"model": "tiny", "max_tokens": 5, "messages": [USER]} | fields
    return parse_generation(MESSAGES_PATH, json.dumps(body).encode()).keep_seconds


def marked(ttl: str | None = None) -> dict[str, Any]:
    control = {"type": "ephemeral"} if ttl is None else {"type": "ephemeral", "ttl": ttl}
    return {"type": "text", "text": "hello", "cache_control": control}


@pytest.mark.parametrize(("wish", "seconds"), [(None, 0), ("in_memory", 0), ("24h", 86_400)])
def test_the_openai_dialect_wishes_for_a_day_or_for_nothing(wish: str | None, seconds: float) -> None:
    assert openai(prompt_cache_retention=wish) == seconds


def test_the_anthropic_dialect_wishes_by_its_marks_wherever_they_are_and_the_longest_counts() -> None:
    assert anthropic() == 0
    assert anthropic(system=[marked()]) == 300
    assert anthropic(messages=[{"role": "user", "content": [marked(), marked("1h"), marked("5m")]}]) == 3_600
    assert anthropic(cache_control={"type": "ephemeral", "ttl": "1h"}) == 3_600
    result = {"type": "tool_result", "tool_use_id": "t", "content": [marked("1h")]}
    assert anthropic(messages=[{"role": "user", "content": [result]}]) == 3_600
    assert anthropic(tools=[{"name": "t", "input_schema": {}, "cache_control": {"type": "ephemeral"}}]) == 300


@pytest.mark.parametrize(
    ("parse", "fields", "param"),
    [
        (openai, {"prompt_cache_retention": "7d"}, "prompt_cache_retention"),
        (openai, {"prompt_cache_retention": 3}, "prompt_cache_retention"),
        (anthropic, {"system": [marked("2h")]}, "system[0].cache_control.ttl"),
        (anthropic, {"cache_control": 3}, "cache_control"),
        (anthropic, {"cache_control": {"ttl": "5m"}}, "cache_control.type"),
        (anthropic, {"messages": [USER | {"cache_control": 3}]}, "messages[0].cache_control"),
        (anthropic, {"system": [marked()] * 3, "messages": [USER | {"content": [marked()] * 2}]}, "cache_control"),
        (
            anthropic,
            {"messages": [USER | {"content": [marked("x")]}]},
            "messages[0].content[0].cache_control.ttl",
        ),
    ],
)
def test_a_wish_that_is_none_is_refused_by_its_name(parse: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
