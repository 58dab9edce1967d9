"""A conversation whose beginning was seen before is rendered as in full, whatever its last message and template."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.tiny_tokenizer import tiny_bundle
from shared.chat_template import ChatTemplate, PromptError
from tests.shared.templates_for_tests import TEMPLATES

_TINY = tiny_bundle().chat_template or ""
_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
# As Qwen3's template does: the text decides, but only by what is spelled here.
_LOOKING = """{% for m in messages %}{% if m.content.startswith('<tool>') %}[{% endif %}{{ m.content | trim }}
{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}{% endif %}{% endfor %}"""
_ALL = {**TEMPLATES, "tiny": _TINY, "looking": _LOOKING}
_TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["<tool>x", "a</think>b", " a ", "a\n", "user", "system", "", "\ue000the text\ue000"]),
)


def _talk(system: str | None, text: str) -> list[dict[str, str]]:
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": text}]


@cache
def _templates(name: str) -> tuple[ChatTemplate, ChatTemplate]:
    """One that splices where it can, one that never does."""
    splicing, plain = (ChatTemplate(_ALL[name], _SPECIAL) for _ in range(2))
    plain._splice.works = False
    return splicing, plain


def _rendered(template: ChatTemplate, messages: list[dict[str, str]], generation_prompt: bool) -> str | None:
    try:
        return template.render(messages, add_generation_prompt=generation_prompt)
    except PromptError:
        return None


@pytest.mark.parametrize("name", _ALL)
@given(texts=st.lists(_TEXTS, min_size=1, max_size=5), system=st.sampled_from([None, "Be brief.", " "]))
def test_what_is_spliced_equals_what_is_rendered(name: str, texts: list[str], system: str | None) -> None:
    splicing, plain = _templates(name)
    for text in ["first", "second", *texts]:
        for generation_prompt in (True, False):
            messages = _talk(system, text)
            assert _rendered(splicing, messages, generation_prompt) == _rendered(plain, messages, generation_prompt)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content | length }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
        "{% for m in messages %}{{ m.content[:20] }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ strftime_now('%d') }}",
        "{% for m in messages %}{{ '%9s' % m.content }}{% endfor %}",
    ],
)
def test_a_template_that_does_more_than_pass_texts_on_is_not_spliced(template: str) -> None:
    assert not ChatTemplate(template, _SPECIAL)._splice.works


def test_the_second_like_conversation_is_learned_and_the_third_is_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(_TINY, _SPECIAL)
    for text in ("one", "two"):
        template.render(_talk("Be brief.", text))

    def refuse(*_: object) -> str:
        raise AssertionError("rendered")

    monkeypatch.setattr(template, "_run", refuse)
    assert "three" in template.render(_talk("Be brief.", "three"))
    with pytest.raises(AssertionError, match="rendered"):
        template.render(_talk("Be long.", "three"))


def test_a_template_that_turns_out_to_differ_is_rendered_in_full_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(_TINY, _SPECIAL)
    splice = template._splice
    for text in ("one", "two"):
        template.render(_talk(None, text))
    monkeypatch.setattr(splice, "_render", lambda messages, generation_prompt: "something else")
    answers = {template.render(_talk(None, f"text {number}")) for number in range(100)}
    assert "something else" in answers
    assert not splice.works
