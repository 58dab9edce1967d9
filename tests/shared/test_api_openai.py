"""OpenAI's bodies: what is understood, what is refused, and how a refusal names its field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.api import CHAT_PATH, ApiError, parse_chat, parse_completion, parse_routing, parse_tokenize
from shared.prompts import ChatPrompt, TextPrompt, TokenPrompt

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", "messages": HELLO} | fields)


def completion(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", "prompt": "once"} | fields)


def refusal(parse: Any, body: bytes) -> ApiError:
    with pytest.raises(ApiError) as raised:
        parse(body)
    assert raised.value.status == 400
    return raised.value


def test_a_bare_chat_body_means_the_api_defaults() -> None:
    request = parse_chat(chat())
    assert request.routing.model == "m"
    assert request.routing.prompt == ChatPrompt(messages=HELLO)
    assert (request.routing.stream, request.routing.max_tokens) == (False, None)
    assert (request.temperature, request.top_p, request.top_k, request.seed) == (1.0, 1.0, 0, None)
    assert (request.stop, request.stop_token_ids, request.ignore_eos) == ((), frozenset(), False)


def test_every_supported_field_arrives() -> None:
    request = parse_chat(
        chat(
            stream=True,
            stream_options={"include_usage": True},
            max_completion_tokens=7,
            temperature=0,
            top_p=0.5,
            top_k=3,
            seed=-5,
            stop="END",
            stop_token_ids=[4, 5],
            ignore_eos=True,
            n=3,
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=-1,
            frequency_penalty=0.5,
            logit_bias={"7": -100, "11": 2.5},
            logprobs=True,
            top_logprobs=4,
            user="u",
            prompt_cache_key="s",
        )
    )
    assert request.routing.stream
    assert request.include_usage
    assert request.routing.max_tokens == 7
    assert (request.temperature, request.top_p, request.top_k, request.seed) == (0.0, 0.5, 3, -5)
    assert (request.stop, request.stop_token_ids, request.ignore_eos) == (("END",), frozenset({4, 5}), True)
    assert (request.n, request.min_p, request.repetition_penalty) == (3, 0.25, 1.5)
    assert (request.presence_penalty, request.frequency_penalty) == (-1.0, 0.5)
    assert (request.logit_bias, request.top_logprobs) == ({7: -100.0, 11: 2.5}, 4)
    assert (request.routing.user, request.routing.session) == ("u", "s")


def test_logprobs_without_rivals_are_those_of_the_answer_alone() -> None:
    assert parse_chat(chat(logprobs=True)).top_logprobs == 0
    assert parse_completion(completion(logprobs=0)).top_logprobs == 0
    assert parse_completion(completion(logprobs=5)).top_logprobs == 5
    assert parse_completion(completion()).top_logprobs is None
    assert refusal(parse_completion, completion(logprobs=True)).code == "invalid_type"


def test_a_completion_may_have_no_tokens_a_chat_answer_at_least_one() -> None:
    assert parse_completion(completion(max_tokens=0)).routing.max_tokens == 0
    assert refusal(parse_chat, chat(max_tokens=0)).param == "max_tokens"


def test_unknown_fields_and_null_fields_are_accepted() -> None:
    assert parse_chat(chat(surprise={"a": [1]}, stop=None, n=None, logit_bias=None, tools=None)) == parse_chat(chat())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2),
        ("echo", True),
        ("prompt_logprobs", 1),
        ("min_tokens", 2),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_object"}),
        ("audio", {}),
        ("modalities", ["text", "audio"]),
        ("functions", [{}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("reasoning_effort", "high"),
        ("chat_template", "{{ 1 }}"),
        ("skip_special_tokens", False),
        ("guided_json", {}),
    ],
)
def test_a_chat_field_that_would_change_the_answer_is_refused_by_name(field: str, value: object) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    error = refusal(parse_chat, chat(**{"tools": tools, field: value}))
    assert error.code == "unsupported_parameter"
    assert error.param == field
    assert field in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [("suffix", "x"), ("prompt_logprobs", 0), ("echo", True), ("best_of", 2), ("prompt", ["a", "b"])],
)
def test_a_completion_field_that_would_change_the_answer_is_refused_by_name(field: str, value: object) -> None:
    error = refusal(parse_completion, completion(**{field: value}))
    assert (error.code, error.param) == ("unsupported_parameter", field)


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1},
        {"presence_penalty": 0.0},
        {"logit_bias": {}},
        {"min_p": 0, "repetition_penalty": 1},
        {"logprobs": False, "top_logprobs": 0},
        {"response_format": {"type": "text"}},
        {"logprobs": False},
    ],
)
def test_a_value_that_changes_nothing_is_accepted(neutral: dict[str, object]) -> None:
    assert parse_chat(chat(**neutral)) == parse_chat(chat())


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperature", 2.1, "temperature"),
        ("temperature", -0.1, "temperature"),
        ("temperature", "hot", "temperature"),
        ("temperature", True, "temperature"),
        ("top_p", 0, "top_p"),
        ("top_p", 1.01, "top_p"),
        ("top_k", -2, "top_k"),
        ("top_k", 1.5, "top_k"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", -1, "max_tokens"),
        ("max_tokens", 10**12, "max_tokens"),
        ("max_tokens", "5", "max_tokens"),
        ("max_tokens", True, "max_tokens"),
        ("max_completion_tokens", 0, "max_completion_tokens"),
        ("n", 0, "n"),
        ("n", 129, "n"),
        ("n", True, "n"),
        ("min_p", 1.1, "min_p"),
        ("presence_penalty", 2.1, "presence_penalty"),
        ("frequency_penalty", -2.1, "frequency_penalty"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("repetition_penalty", 1e-300, "repetition_penalty"),
        ("logit_bias", [], "logit_bias"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("logit_bias", {"-1": 1}, "logit_bias"),
        ("logit_bias", {"5000000000": 1}, "logit_bias"),
        ("logit_bias", {"5": 101}, "logit_bias.5"),
        ("logit_bias", {"5": "much"}, "logit_bias.5"),
        ("logit_bias", {str(token): 1 for token in range(1025)}, "logit_bias"),
        ("logprobs", 1, "logprobs"),
        ("top_logprobs", 3, "top_logprobs"),
        ("top_logprobs", 21, "top_logprobs"),
        ("seed", 2**63, "seed"),
        ("seed", 1.5, "seed"),
        ("stop", "", "stop"),
        ("stop", ["a", ""], "stop"),
        ("stop", ["a", 1], "stop"),
        ("stop", ["a"] * 17, "stop"),
        ("stop", ["a" * 2000], "stop"),
        ("stop_token_ids", [-1], "stop_token_ids"),
        ("stop_token_ids", ["a"], "stop_token_ids"),
        ("stop_token_ids", [True], "stop_token_ids"),
        ("stream", 1, "stream"),
        ("ignore_eos", "yes", "ignore_eos"),
        ("user", 3, "user"),
        ("prompt_cache_key", [], "prompt_cache_key"),
        ("stream_options", [], "stream_options"),
        ("stream_options", {"include_usage": "yes"}, "stream_options.include_usage"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("model", None, "model"),
        ("model", "", "model"),
        ("model", 5, "model"),
        ("tools", {}, "tools"),
        ("tool_choice", "required", "tool_choice"),
        ("tools", ["f"], "tools[0]"),
        ("chat_template_kwargs", [], "chat_template_kwargs"),
        ("messages", None, "messages"),
        ("messages", [], "messages"),
        ("messages", "hello", "messages"),
        ("messages", ["hello"], "messages[0]"),
        ("messages", [{"content": "x"}], "messages[0].role"),
        ("messages", [{"role": "wizard", "content": "x"}], "messages[0].role"),
        ("messages", [{"role": ["user"], "content": "x"}], "messages[0].role"),
        ("messages", [*HELLO, {"role": "user"}], "messages[1].content"),
        ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
        ("messages", [{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ("messages", [{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ("messages", [{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function.name"),
        ("continue_final_message", 1, "continue_final_message"),
    ],
)
def test_a_wrong_chat_field_is_named_with_its_path(field: str, value: object, param: str) -> None:
    error = refusal(parse_chat, chat(**{field: value}))
    assert error.param == param
    assert error.message.startswith(param)


def test_two_names_of_one_limit_must_agree() -> None:
    assert parse_chat(chat(max_tokens=5, max_completion_tokens=5)).routing.max_tokens == 5
    assert refusal(parse_chat, chat(max_tokens=5, max_completion_tokens=6)).param == "max_completion_tokens"


def test_content_parts_become_one_string_and_null_fields_disappear() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    answered = {"role": "assistant", "content": None, "refusal": None, "audio": None}
    request = parse_chat(
        chat(messages=[{"role": "developer", "content": "be"}, {"role": "user", "content": parts}, answered])
    )
    assert request.routing.prompt == ChatPrompt(
        messages=[
            {"role": "system", "content": "be"},
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": ""},
        ]
    )


def test_tool_arguments_reach_the_template_as_objects() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    prompt = parse_chat(chat(messages=[{"role": "assistant", "tool_calls": [call]}])).routing.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    call["function"] = {"name": "f", "arguments": "[1]"}
    error = refusal(parse_chat, chat(messages=[{"role": "assistant", "tool_calls": [call]}]))
    assert error.param == "messages[0].tool_calls[0].function.arguments"


def test_tools_are_offered_unless_the_choice_is_none() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    offered, withheld = (
        parse_chat(chat(tools=tools, tool_choice=choice)).routing.prompt for choice in ("auto", "none")
    )
    assert isinstance(offered, ChatPrompt)
    assert isinstance(withheld, ChatPrompt)
    assert (offered.tools, withheld.tools) == (tools, None)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("once", TextPrompt("once")),
        (["once"], TextPrompt("once")),
        ([1, 2], TokenPrompt([1, 2])),
        ([[1]], TokenPrompt([1])),
    ],
)
def test_a_completion_takes_text_or_token_ids(prompt: object, expected: object) -> None:
    assert parse_completion(completion(prompt=prompt)).routing.prompt == expected


@pytest.mark.parametrize("prompt", [None, 5, {}, [-1], [2**32], [1, "a"], [[["a"]]], [True]])
def test_any_other_completion_prompt_is_refused(prompt: object) -> None:
    assert refusal(parse_completion, completion(prompt=prompt)).param == "prompt"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"model": "m"} x',
        b'{"model": NaN}',
        b'{"model": 1e999}',
        b'{"model": "\\ud800"}',
        b'{"model": "\xff"}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": ' + b"9" * 5_000 + b"}",
    ],
)
def test_what_is_not_a_json_object_is_invalid_json(body: bytes) -> None:
    error = refusal(parse_chat, body)
    assert (error.code, error.param) == ("invalid_json", None)


_ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 0, 1, -1, 7.0, "", "x", [], {}, [{}], 2**31, ["x"], "user", "developer"]
)
_MESSAGES = st.one_of(
    _ODD,
    st.lists(
        st.one_of(
            _ODD,
            st.fixed_dictionaries(
                {"role": st.one_of(st.just("user"), _ODD), "content": st.one_of(st.just("hi"), _ODD)},
                optional={"name": st.just("n"), "tool_calls": _ODD},
            ),
        ),
        min_size=1,
        max_size=2,
    ),
)


@given(
    st.fixed_dictionaries(
        {"model": st.one_of(st.just("m"), _ODD), "messages": _MESSAGES},
        optional=dict.fromkeys(
            ("stream", "max_tokens", "max_completion_tokens", "user", "tools", "add_generation_prompt"), _ODD
        ),
    )
)
def test_plain_chats_are_read_as_all_others_are(body: dict[str, Any]) -> None:
    def read(values: dict[str, Any]) -> object:
        try:
            return parse_routing(CHAT_PATH, msgspec.json.encode(values))
        except ApiError as error:
            return error.status, error.code, error.message

    # A field that says nothing, and is not one of a plain chat's.
    assert read(body) == read({"continue_final_message": None, **body})


def test_routing_skips_what_it_does_not_need_and_agrees_on_the_rest() -> None:
    body = chat(stream=True, max_tokens=9, user="u", prompt_cache_key="s", temperature=99, n=7)
    assert (
        parse_routing(CHAT_PATH, body)
        == parse_chat(chat(stream=True, max_tokens=9, user="u", prompt_cache_key="s")).routing
    )


def test_of_a_repeated_key_both_tiers_take_the_last() -> None:
    body = b'{"model": 3, "messages": 5, "model": "m", "messages": [{"role": "user", "content": "hello"}]}'
    assert parse_routing(CHAT_PATH, body) == parse_chat(body).routing


def test_tokenize_takes_the_body_of_either_endpoint() -> None:
    assert parse_tokenize(b'{"prompt": "x"}').prompt == TextPrompt("x")
    assert parse_tokenize(chat()).prompt == ChatPrompt(messages=HELLO)
    assert refusal(parse_tokenize, b'{"model": "m"}').code == "missing_required_parameter"
