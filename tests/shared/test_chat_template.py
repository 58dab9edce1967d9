"""Rendering equals transformers' own, fails in words, and always comes to an end."""

from __future__ import annotations

import time
from functools import cache
from typing import Any, cast

import pytest
from transformers import PreTrainedTokenizerFast

from shared.chat_template import ChatTemplate, PromptError
from shared.tokenizer_bundle import BundleError
from tests.shared.templates_for_tests import TEMPLATES
from tests.shared.tokenizers_for_tests import byte_level

_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": "<Zürich> & 'co'"}}}]
_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "  Hello <|im_end|> <b>&amp;</b> {{ 7 * 7 }} 東京\n"},
    {"role": "assistant", "content": "Hi!\n\n"},
    {"role": "user", "content": "And\u00a0now?"},
]
_TALKS: dict[str, list[dict[str, Any]]] = {
    "one question": _TALK[:1],
    "three turns": _TALK,
    "system prompt": [{"role": "system", "content": " Be brief. "}, *_TALK],
    "tool call": [
        _TALK[0],
        {
            "role": "assistant",
            "content": None,
            "reasoning": "\nlet me look\n",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ],
}


@cache
def _reference() -> PreTrainedTokenizerFast:
    make: Any = PreTrainedTokenizerFast
    return cast(PreTrainedTokenizerFast, make(tokenizer_object=byte_level(), **_SPECIAL))


def _expected(template: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """None where transformers refuses too."""
    try:
        rendered = _reference().apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    except Exception:
        return None
    assert isinstance(rendered, str)
    return rendered


@pytest.mark.parametrize("talk", _TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, _TOOLS])
def test_rendering_equals_transformers(
    name: str, talk: str, generation_prompt: bool, tools: list[dict[str, Any]] | None
) -> None:
    template = ChatTemplate(TEMPLATES[name], _SPECIAL)
    expected = _expected(TEMPLATES[name], _TALKS[talk], add_generation_prompt=generation_prompt, tools=tools)
    if expected is None:
        with pytest.raises(PromptError):
            template.render(_TALKS[talk], tools, add_generation_prompt=generation_prompt)
    else:
        assert template.render(_TALKS[talk], tools, add_generation_prompt=generation_prompt) == expected


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("ending", ["The answer is", "The answer is  \n", ""])
def test_continuing_the_final_message_equals_transformers(name: str, ending: str) -> None:
    talk = [_TALK[0], {"role": "assistant", "content": ending}]
    expected = _expected(TEMPLATES[name], talk, continue_final_message=True)
    assert expected is not None
    rendered = ChatTemplate(TEMPLATES[name], _SPECIAL).render(
        talk, add_generation_prompt=False, continue_final_message=True
    )
    assert rendered == expected


def test_template_variables_reach_the_template() -> None:
    template = ChatTemplate(TEMPLATES["with tools and reasoning"], _SPECIAL)
    expected = _expected(
        TEMPLATES["with tools and reasoning"], _TALK, add_generation_prompt=True, enable_thinking=False
    )
    assert template.render(_TALK, template_kwargs={"enable_thinking": False}) == expected
    with pytest.raises(PromptError, match="must not set messages"):
        template.render(_TALK, template_kwargs={"messages": []})


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_parts_mean_the_same_as_a_string(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], _SPECIAL)
    in_parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in _TALK]
    assert template.render(in_parts).replace("\n", "") == template.render(_TALK).replace("\n", "")


def test_several_text_parts_are_joined_by_newlines_for_a_template_that_wants_strings() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    rendered = ChatTemplate(TEMPLATES["chatml"], {}).render([{"role": "user", "content": parts}])
    assert "one\ntwo<|im_end|>" in rendered


def test_arguments_of_tool_calls_are_parsed_before_the_template_writes_them_out() -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}", {})
    for arguments, shown in (('{"a": "é"}', '{"a": "é"}'), ("", "{}"), ("{broken", '"{broken"')):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        assert template.render([{"role": "assistant", "tool_calls": [call]}]) == shown


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": 7}], "messages[1].role"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url"}]}],
            "messages[0].content[1].type",
        ),
    ],
)
def test_a_bad_message_is_refused_and_its_field_named(messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(PromptError) as refused:
        ChatTemplate(TEMPLATES["chatml"], {}).render(messages)
    assert refused.value.param == param


def test_the_words_of_a_template_that_refuses_reach_the_user() -> None:
    with pytest.raises(PromptError, match="Roles must alternate"):
        ChatTemplate(TEMPLATES["alternating roles"], _SPECIAL).render(_TALK[1:])


def test_a_template_that_does_not_compile_is_a_bad_bundle() -> None:
    for source in ("{% for %}", "{{ ", "{% nonsense %}"):
        with pytest.raises(BundleError, match="does not compile"):
            ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% set x = namespace(s='ab') %}{% for a in range(99) %}{% set x.s = x.s ~ x.s %}{% endfor %}",
        "{% set x = namespace(s='ab') %}{% for a in range(99) %}{% set x.s = x.s + x.s %}{% endfor %}",
        "{% set x = namespace(s='ab') %}{% for a in range(99) %}{% set x.s = [x.s, x.s] | join %}{% endfor %}",
        "{% set x = namespace(s='ab') %}{% for a in range(99) %}{% set t %}{{ x.s }}{{ x.s }}{% endset %}"
        "{% set x.s = t %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for a in 'abcdefghij' * 9 recursive %}{{ loop('abcdefghij' * 9) if loop.depth < 9 }}{% endfor %}",
        "{% for a in range(9999) %}{{ messages[0].content * 99999 }}{% endfor %}",
        "{% for a in range(99999) %}" + "{% if a.b.c.d is defined %}x{% endif %}" * 5000 + "{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ 'x' | center(9999999999) }}",
        "{{ 'x'.ljust(9999999999) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
        "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
        "{{ messages.__class__ }}{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_hostile_template_is_stopped(source: str) -> None:
    try:
        template = ChatTemplate(source, {})
    except BundleError:
        return  # a constant of absurd size is noticed even before
    began = time.thread_time()
    with pytest.raises(PromptError):
        template.render([{"role": "user", "content": "x" * 1000}])
    assert time.thread_time() - began < 3


def test_a_stopped_template_leaves_the_next_rendering_its_whole_budget() -> None:
    template = ChatTemplate(
        "{% for a in range(messages[0].n) %}{% for b in range(90000) %}{% endfor %}{% endfor %}ok", {}
    )
    with pytest.raises(PromptError, match="stopped"):
        template.render([{"role": "user", "n": 90000}])
    assert template.render([{"role": "user", "n": 5}]) == "ok"


def test_a_long_conversation_is_far_from_the_budget() -> None:
    talk = [{"role": ("user", "assistant")[turn % 2], "content": "word " * 400} for turn in range(1000)]
    for source in TEMPLATES.values():
        assert len(ChatTemplate(source, _SPECIAL).render(talk)) > 1_900_000
