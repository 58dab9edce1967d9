"""Words that are remembered give the ids that the tokenizer gives, whatever kind of tokenizer it is."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shared.blocks import unpack_tokens
from shared.word_memo import WordMemo, word_memo_of
from tests.shared.tokenizers_for_tests import REGEXES, SPECIAL_TOKENS, TOKENIZERS, byte_level, splitting_by

_WITH_WORDS = {"byte level", "byte level with special tokens around", "greedy added tokens", *REGEXES}


@cache
def _memo(name: str) -> tuple[Tokenizer, WordMemo | None]:
    tokenizer = splitting_by(REGEXES[name]) if name in REGEXES else TOKENIZERS[name]()
    return tokenizer, word_memo_of(tokenizer, tokenizer.to_str().encode())


_PIECES = st.one_of(
    st.sampled_from([*SPECIAL_TOKENS, "<|im", "<word>", "later", "Fox", "the quick", "  ", "\r\n\n", "don't", "I'LL"]),
    st.text(st.characters(max_codepoint=127), max_size=6),
    st.text(st.characters(max_codepoint=0x530), max_size=6),
    st.text(max_size=2),
)


@pytest.mark.parametrize("name", sorted(_WITH_WORDS))
@given(pieces=st.lists(_PIECES, max_size=12))
@settings(max_examples=300, deadline=None)
def test_words_give_the_ids_of_the_tokenizer(name: str, pieces: list[str]) -> None:
    tokenizer, memo = _memo(name)
    assert memo is not None
    text = "".join(pieces)
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    for _ in ("learned", "known"):
        ids = memo.ids(text)
        assert ids is None or unpack_tokens(ids) == expected


@pytest.mark.parametrize("name", sorted(_WITH_WORDS))
def test_plain_text_is_put_together_from_words(name: str) -> None:
    memo = _memo(name)[1]
    assert memo is not None
    text = "<|im_start|>user\nthe lazy dog  says: hello, World! 12345<|im_end|>\n"
    assert memo.ids(text) is not None
    assert memo.ids(text) == memo.ids(text)
    assert memo.ids("naïve “café”, это тест") is not None
    assert memo.ids("東京") is None
    assert memo.ids("x" * 20_000) is None


@pytest.mark.parametrize("name", sorted(TOKENIZERS.keys() - _WITH_WORDS))
def test_other_kinds_of_tokenizers_are_left_alone(name: str) -> None:
    assert _memo(name)[1] is None


def test_what_a_regular_expression_may_say_is_bounded() -> None:
    for regex in (r"(a)|.", r"\p{Han}+", r"(?<=a)b", r"\bword", r"[\s&&[^a]]+", "["):
        tokenizer = splitting_by(REGEXES["llama 3"])
        described = json.loads(tokenizer.to_str())
        described["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = regex
        assert word_memo_of(tokenizer, json.dumps(described).encode()) is None


def test_a_description_that_says_otherwise_than_the_tokenizer_is_not_believed() -> None:
    assert word_memo_of(byte_level(), splitting_by(REGEXES["llama 3"]).to_str().encode()) is None


def test_words_without_end_take_no_memory_without_end() -> None:
    tokenizer = byte_level()
    memo = word_memo_of(tokenizer, tokenizer.to_str().encode(), most_words=100)
    assert memo is not None
    for number in range(500):
        text = f" {number} {number}x {'long' * 30}{number}"
        ids = memo.ids(text)
        assert ids is not None
        assert unpack_tokens(ids) == tokenizer.encode(text, add_special_tokens=False).ids
        assert len(memo) <= 100
