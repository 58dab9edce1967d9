"""Pieces of text, joined, are the whole, and none of them ends in half a character."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shared.incremental_decoder import IncrementalDecoder
from tests.shared.tokenizers_for_tests import SPECIAL_TOKENS, TOKENIZERS


@cache
def _tokenizer(name: str) -> Tokenizer:
    return TOKENIZERS[name]()


def _pieces(tokenizer: Tokenizer, steps: list[list[int]]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer)
    return [*(decoder.push(step) for step in steps), decoder.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(max_size=60), sizes=st.lists(st.integers(0, 4), min_size=1, max_size=8))
@settings(max_examples=80, deadline=None)
def test_text_comes_out_whole_in_whole_characters(name: str, text: str, sizes: list[int]) -> None:
    tokenizer = _tokenizer(name)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    steps, start = [], 0
    for turn in range(len(ids) + 1):
        size = max(sizes[turn % len(sizes)], 1) if start < len(ids) else 0
        steps.append(ids[start : start + size])
        start += size
    pieces = _pieces(tokenizer, steps)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in piece for piece in pieces)


@given(seed=st.integers(0, 10_000), length=st.integers(0, 300))
@settings(max_examples=150, deadline=None)
def test_any_byte_tokens_in_any_order_come_out_as_the_decoded_whole(seed: int, length: int) -> None:
    tokenizer = _tokenizer("byte level")
    draw = random.Random(seed)
    ids = [draw.randrange(len(SPECIAL_TOKENS), tokenizer.get_vocab_size()) for _ in range(length)]
    assert "".join(_pieces(tokenizer, [[token] for token in ids])) == tokenizer.decode(ids)


def test_a_character_is_given_out_with_its_last_byte_and_not_before() -> None:
    tokenizer = _tokenizer("byte level")
    ids = tokenizer.encode("🙂").ids
    assert len(ids) == 4
    assert _pieces(tokenizer, [[token] for token in ids]) == ["", "", "", "🙂", ""]


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    tokenizer = _tokenizer("byte level")
    ids = tokenizer.encode("a🙂").ids[:-1]
    assert _pieces(tokenizer, [[token] for token in ids]) == ["a", "", "", "", "\ufffd"]


def test_invalid_bytes_without_end_are_given_out_and_cost_no_more_and_more() -> None:
    tokenizer = _tokenizer("byte level")
    bad = tokenizer.encode("🙂").ids[0]
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push([bad]) for _ in range(500)]
    assert sum(len(piece) for piece in pieces) >= 497
    assert decoder.window_tokens <= 32
    assert "".join(pieces) + decoder.flush() == tokenizer.decode([bad] * 500)


def test_hidden_tokens_give_no_text_and_leave_the_spaces_around_them_right() -> None:
    tokenizer = _tokenizer("metaspace before the first word")
    hidden = tokenizer.token_to_id("<|im_end|>")
    assert hidden is not None
    ids = [*tokenizer.encode("hello").ids, *[hidden] * 50, *tokenizer.encode("world").ids]
    decoder = IncrementalDecoder(tokenizer, frozenset({hidden}))
    assert "".join(decoder.push([token]) for token in ids) + decoder.flush() == tokenizer.decode(ids) == "hello world"
    assert "<|im_end|>" in "".join(_pieces(tokenizer, [ids]))
