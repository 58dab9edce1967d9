"""What a client gets to see of an answer, and when."""

from __future__ import annotations

import pytest

from replica.answer import Answer, Finish, Part
from replica.engine_events import TokenEvent
from replica.runner import TokenLogprobs
from replica.sequence import FinishReason
from replica.tiny_tokenizer import tiny_bundle
from shared.prompts import PromptEncoder, TextPrompt

END = 77


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(tiny_bundle())


def begin(encoder: PromptEncoder, stops: tuple[str, ...] = (), prompt_tokens: int = 35) -> Answer:
    return Answer(prompt_tokens, 16, encoder.incremental_decoder(), stops, frozenset({END}), arrival_seconds=0.0)


def token(token_id: int, finish: FinishReason | None = None, cached_tokens: int = 0) -> TokenEvent:
    return TokenEvent("r", (token_id,), cached_tokens, finish)


async def test_half_a_character_is_held_back_until_it_is_whole(encoder: PromptEncoder) -> None:
    answer = begin(encoder)
    ids = encoder.encode(TextPrompt("🙂")).token_ids
    assert len(ids) > 1
    for token_id in ids[:-1]:
        answer.push(token(token_id))
        assert answer.take().text == ""
    answer.push(token(ids[-1]))
    assert answer.take().text == "🙂"


async def test_half_a_character_at_the_end_is_shown_as_what_it_is(encoder: PromptEncoder) -> None:
    answer = begin(encoder)
    [first, *_] = encoder.encode(TextPrompt("🙂")).token_ids
    answer.push(token(first, FinishReason.LENGTH))
    assert answer.take() == Part("\ufffd", Finish(FinishReason.LENGTH))


async def test_what_may_become_a_stop_string_waits_and_comes_out_at_the_end(encoder: PromptEncoder) -> None:
    answer = begin(encoder, stops=("ab!",))
    for token_id in encoder.encode(TextPrompt("xab")).token_ids:
        answer.push(token(token_id))
    assert answer.take().text == "x"
    answer.push(TokenEvent("r", (), 0, FinishReason.LENGTH))
    last = answer.take()
    assert (last.text, last.finish) == ("ab", Finish(FinishReason.LENGTH))


async def test_the_token_that_stops_an_answer_counts_but_is_not_shown(encoder: PromptEncoder) -> None:
    answer = begin(encoder)
    [word] = encoder.encode(TextPrompt("x")).token_ids
    answer.push(token(word))
    answer.push(token(END, FinishReason.STOP))
    assert answer.take().text == "x"
    assert answer.usage.completion_tokens == 2


async def test_a_slow_reader_finds_all_text_in_one_part(encoder: PromptEncoder) -> None:
    answer = begin(encoder)
    for token_id in encoder.encode(TextPrompt("all of it")).token_ids:
        answer.push(token(token_id))
    assert answer.take().text == "all of it"


@pytest.mark.parametrize(("cached", "written"), [(0, 32), (16, 16), (32, 0), (34, 0)])
async def test_what_was_written_to_the_cache_is_the_rest_of_the_full_blocks(
    encoder: PromptEncoder, cached: int, written: int
) -> None:
    answer = begin(encoder)
    answer.push(token(5, cached_tokens=cached))
    assert (answer.usage.cached_tokens, answer.usage.cache_write_tokens) == (cached, written)


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (FinishReason.STOP, None),
        (FinishReason.LENGTH, None),
        (FinishReason.ABORT, "not_ready"),
        (FinishReason.ERROR, "internal_error"),
    ],
)
def test_an_end_that_is_no_answer_says_so(reason: FinishReason, code: str | None) -> None:
    failure = Finish(reason).failure
    assert (failure.code if failure is not None else None) == code


def told_token(token_id: int, finish: FinishReason | None = None) -> TokenEvent:
    return TokenEvent("r", (token_id,), 0, finish, logprobs=(TokenLogprobs(token_id, -0.5, ()),))


async def test_a_token_is_told_with_the_text_it_begins(encoder: PromptEncoder) -> None:
    answer = begin(encoder)
    [word] = encoder.encode(TextPrompt("x")).token_ids
    halves = encoder.encode(TextPrompt("🙂")).token_ids
    told = []
    for token_id in (word, *halves):
        answer.push(told_token(token_id))
        told.append([(shown.offset, shown.logprobs.token) for shown in answer.take().tokens])
    assert told == [[(0, word)], *[[]] * (len(halves) - 1), [(1, half) for half in halves]]


async def test_what_is_held_back_for_a_stop_string_is_told_when_it_is_shown(encoder: PromptEncoder) -> None:
    answer = begin(encoder, stops=("ab!",))
    ids = encoder.encode(TextPrompt("xab")).token_ids
    for token_id in ids:
        answer.push(told_token(token_id))
    before = answer.take().tokens
    answer.push(TokenEvent("r", (), 0, FinishReason.LENGTH))
    after = answer.take().tokens
    assert [shown.logprobs.token for shown in (*before, *after)] == ids
    assert len(after) == len(ids) - 1


async def test_tokens_that_a_stop_string_cut_off_are_not_told(encoder: PromptEncoder) -> None:
    answer = begin(encoder, stops=("b",))
    ids = [encoder.encode(TextPrompt(letter)).token_ids[0] for letter in "xab"]
    for token_id in ids:
        answer.push(told_token(token_id))
    part = answer.take()
    assert (part.text, part.finish) == ("xa", Finish(FinishReason.STOP, stop_string="b"))
    assert [shown.logprobs.token for shown in part.tokens] == ids[:2]


async def test_the_token_that_stops_an_answer_is_not_told(encoder: PromptEncoder) -> None:
    answer = begin(encoder)
    answer.push(told_token(END, FinishReason.STOP))
    assert answer.take() == Part("", Finish(FinishReason.STOP))
