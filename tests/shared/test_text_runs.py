"""Cutting a text never changes its token ids, whatever the tokenizer does around a cut."""

from __future__ import annotations

import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shared.text_runs import TextRuns, joins_no_words
from tests.shared.tokenizers_for_tests import REGEXES, SPECIAL_TOKENS, TOKENIZERS, byte_level, splitting_by

_PIECES = st.one_of(
    st.sampled_from(
        [
            *SPECIAL_TOKENS,
            *("<left>", "<right>", "<word>", "whole", "<|im", "later", "Fox", "hello", "HELLO", "wholesome"),
            *(
                " ",
                "  ",
                "\n",
                "\n\n",
                "\u00a0",
                "\u3000",
                "x",
                "_",
                "the ",
                "don't",
                "▁",
                "<",
                "|>",
                "<|im_",
                "é",
                "\u0301",
            ),
        ]
    ),
    st.text(max_size=6),
)


@cache
def _tokenizer(name: str) -> Tokenizer:
    return TOKENIZERS[name]()


@cache
def _splitting(name: str) -> Tokenizer:
    return splitting_by(REGEXES[name])


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", TOKENIZERS)
@given(pieces=st.lists(_PIECES, max_size=16))
@settings(max_examples=150, deadline=None)
def test_runs_encoded_one_by_one_give_the_ids_of_the_whole(name: str, pieces: list[str]) -> None:
    tokenizer = _tokenizer(name)
    text = "".join(pieces)
    runs = TextRuns(tokenizer, min_run_characters=1).split(text)
    assert "".join(runs) == text
    assert [token for run in runs for token in _ids(tokenizer, run)] == _ids(tokenizer, text)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(opening=st.lists(_PIECES, max_size=12), rest=st.lists(_PIECES, max_size=4))
@settings(max_examples=150, deadline=None)
def test_an_opening_is_cut_where_every_text_is_that_begins_with_it(
    name: str, opening: list[str], rest: list[str]
) -> None:
    text_runs = TextRuns(_tokenizer(name), min_run_characters=1)
    runs, remains = text_runs.split_opening("".join(opening))
    assert runs + text_runs.split(remains + "".join(rest)) == text_runs.split("".join(opening + rest))


_WORDY = st.lists(
    st.one_of(
        st.sampled_from([*SPECIAL_TOKENS, " a", "b c", "\n", "\nThe", "don't", " 's", "-x y", "naïve ", "東京"]),
        _PIECES,
    ),
    max_size=16,
)


@pytest.mark.parametrize("name", sorted(REGEXES))
@given(pieces=_WORDY, rest=_WORDY)
@settings(max_examples=200, deadline=None)
def test_long_runs_are_cut_between_words_and_give_the_same_ids(name: str, pieces: list[str], rest: list[str]) -> None:
    tokenizer = _splitting(name)
    text_runs = TextRuns(tokenizer, min_run_characters=4, long_run_characters=1, parts_words=True)
    text = "".join(pieces)
    runs = text_runs.split(text)
    assert "".join(runs) == text
    assert [token for run in runs for token in _ids(tokenizer, run)] == _ids(tokenizer, text)
    opening, remains = text_runs.split_opening(text)
    assert opening + text_runs.split(remains + "".join(rest)) == text_runs.split(text + "".join(rest))


@pytest.mark.parametrize("name", sorted(REGEXES))
def test_a_long_run_is_cut_where_only_what_is_left_of_it_decides(name: str) -> None:
    text = "some words and more " * 2000
    runs = TextRuns(_splitting(name), parts_words=True).split(text)
    assert len(runs) == 5
    assert TextRuns(_splitting(name), parts_words=True).split(text[:30_000])[:3] == runs[:3]
    assert TextRuns(_splitting(name)).split(text) == [text]


@pytest.mark.parametrize(
    ("words", "added", "expected"),
    [
        (r" ?[A-Za-z]+|[0-9]+|\s+|.", ["<s>"], True),
        (r" ?[A-Za-z]+|[0-9]+|\s+|.", ["<a b>"], False),
        (r"[A-Za-z]+ ?|[0-9]+|\s+|.", ["<s>"], False),
        (r"[A-Za-z ]+|[0-9]+|\s+|.", ["<s>"], False),
        (r"\s?[A-Za-z]+|[0-9]+|\s+|.", ["<s>"], False),
    ],
)
def test_only_tokenizers_that_join_no_words_are_cut_there(words: str, added: list[str], expected: bool) -> None:
    assert joins_no_words(re.compile(words), added) is expected


def test_a_conversation_that_grows_keeps_all_runs_but_the_last() -> None:
    runs = TextRuns(byte_level())
    turns = [f"<|im_start|>user\n{'word ' * 100}{number}<|im_end|>\n" for number in range(40)]
    before, after = runs.split("".join(turns[:30])), runs.split("".join(turns))
    assert len(before) > 10
    assert after[: len(before) - 1] == before[:-1]


def test_a_tokenizer_without_added_tokens_gives_one_run() -> None:
    from tokenizers import models

    assert TextRuns(Tokenizer(models.BPE())).split("<s>" * 2000) == ["<s>" * 2000]
    assert TextRuns(byte_level()).split("") == []
