"""Prompts become exactly the tokenizer's ids and the chain's keys, and only what is new is worked on."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from shared.blocks import block_keys, namespace_root, published_key
from shared.chat_template import ChatTemplate
from shared.prompts import (
    ChatPrompt,
    PromptEncoder,
    PromptError,
    PromptInput,
    TextPrompt,
    TokenizerBundle,
    TokenPrompt,
)
from shared.tokenizer_bundle import BundleError
from tests.shared.templates_for_tests import TEMPLATES
from tests.shared.tokenizers_for_tests import SPECIAL_TOKENS, TOKENIZERS, byte_level

_ROOT = namespace_root("model", "tenant", "secret")
_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@cache
def _bundle(name: str = "byte level", template: str | None = "chatml") -> TokenizerBundle:
    source = None if template is None else TEMPLATES[template]
    return TokenizerBundle(TOKENIZERS[name]().to_str().encode(), _SPECIAL, source)


def _talk(turns: int, words: int = 60) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[turn % 2], "content": f"turn {turn} " + "hello world " * words} for turn in range(turns)]


def _expected_keys(ids: list[int], block_size: int = 16) -> list[int]:
    return [published_key(key) for key in block_keys(_ROOT, ids, block_size)]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_becomes_the_ids_that_transformers_gives(template: str) -> None:
    make: Any = PreTrainedTokenizerFast
    reference = make(tokenizer_object=TOKENIZERS["byte level with special tokens around"](), **_SPECIAL)
    encoder = PromptEncoder(_bundle("byte level with special tokens around", template))
    for turns in (1, 3, 41):
        expected = reference.apply_chat_template(
            _talk(turns), chat_template=TEMPLATES[template], add_generation_prompt=True, return_dict=False
        )
        for _ in ("cold", "from the memo"):
            assert encoder.encode(ChatPrompt(_talk(turns))).token_ids == expected


@pytest.mark.parametrize("name", TOKENIZERS)
@given(
    pieces=st.lists(st.one_of(st.sampled_from([*SPECIAL_TOKENS, " ", "\n", "whole"]), st.text(max_size=8)), max_size=12)
)
@settings(max_examples=40, deadline=None)
def test_a_text_gets_the_special_tokens_of_the_post_processor(name: str, pieces: list[str]) -> None:
    encoder = _encoder(name)
    text = "x" + "".join(pieces) * 40
    expected = encoder.tokenizer.encode(text, add_special_tokens=True).ids
    for _ in ("cold", "from the memo"):
        assert encoder.encode(TextPrompt(text)).token_ids == expected


@cache
def _encoder(name: str) -> PromptEncoder:
    return PromptEncoder(_bundle(name))


def test_special_tokens_spelled_out_by_a_user_are_special_tokens_as_in_the_engine() -> None:
    encoder = PromptEncoder(_bundle())
    ids = encoder.encode(ChatPrompt([{"role": "user", "content": "stop <|im_end|> here"}])).token_ids
    assert [encoder.tokenizer.id_to_token(token) for token in ids].count("<|im_end|>") == 2


def test_a_tokenizer_whose_whole_is_not_the_sum_of_its_runs_is_given_whole_texts() -> None:
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <s> $A", special_tokens=[("<s>", 0)])
    encoder = PromptEncoder(TokenizerBundle(tokenizer.to_str().encode(), {}, TEMPLATES["chatml"]))
    text = "<|im_start|> hello" * 600
    for _ in ("cold", "from the memo"):
        assert encoder.encode(TextPrompt(text)).token_ids == tokenizer.encode(text).ids
        messages = [{"role": "user", "content": text}]
        rendered = ChatTemplate(TEMPLATES["chatml"], {}).render(messages)
        expected = tokenizer.encode(rendered, add_special_tokens=False).ids
        assert encoder.encode(ChatPrompt(messages)).token_ids == expected


def test_token_ids_are_taken_as_they_are() -> None:
    encoder = PromptEncoder(_bundle())
    ids = [index % encoder.vocabulary_size for index in range(5000)]
    assert encoder.encode(TokenPrompt(ids)).token_ids == ids
    assert encoder.keys(encoder.encode(TokenPrompt(ids)), _ROOT, 16) == _expected_keys(ids)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (TokenPrompt([1, -1]), "non-negative"),
        (TokenPrompt([1, 2**40]), "non-negative"),
        (TokenPrompt([1, 10**6]), "not in the vocabulary"),
        (TokenPrompt([]), "empty"),
        (TextPrompt(""), "empty"),
        (TextPrompt("half a pair: \ud83d"), "does not accept"),
        (ChatPrompt([]), "must not be empty"),
        (ChatPrompt([{"role": "user", "content": "x"}], continue_final_message=True), "exclude each other"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused_in_words(prompt: PromptInput, message: str) -> None:
    encoder = PromptEncoder(_bundle())
    with pytest.raises(PromptError, match=message):
        encoder.encode(prompt)


def test_a_model_without_a_template_refuses_chats_and_says_what_works() -> None:
    encoder = PromptEncoder(_bundle(template=None))
    with pytest.raises(PromptError, match="/v1/completions"):
        encoder.encode(ChatPrompt([{"role": "user", "content": "x"}]))
    assert encoder.encode(TextPrompt("hello")).token_count > 0


@given(lengths=st.lists(st.integers(0, 70), min_size=1, max_size=20), block_size=st.sampled_from([1, 3, 16, 64]))
@settings(max_examples=100, deadline=None)
def test_keys_through_the_memo_are_the_keys_of_the_whole_chain(lengths: list[int], block_size: int) -> None:
    encoder = _encoder("byte level")
    messages: list[dict[str, Any]] = []
    for number, words in enumerate(lengths):
        messages.append({"role": "user", "content": f"{number} " + "word " * (words * 7)})
        encoded = encoder.encode(ChatPrompt(messages))
        assert encoder.keys(encoded, _ROOT, block_size) == _expected_keys(encoded.token_ids, block_size)


def test_keys_of_another_tenant_or_block_size_are_not_taken_from_the_memo() -> None:
    encoder = PromptEncoder(_bundle())
    encoded = encoder.encode(ChatPrompt(_talk(9)))
    mine = encoder.keys(encoded, _ROOT, 16)
    assert encoder.keys(encoded, namespace_root("model", "other", "secret"), 16)[0] != mine[0]
    assert encoder.keys(encoded, _ROOT, 32) == _expected_keys(encoded.token_ids, 32)


def test_a_conversation_that_grows_costs_its_new_message() -> None:
    encoder = PromptEncoder(_bundle())
    for turns in (99, 100, 101):
        encoder.encode(ChatPrompt(_talk(turns)))
    prepared = encoder.prepare(ChatPrompt(_talk(103)))
    assert 0 < prepared.unseen_characters < 4 * len(_talk(1)[0]["content"])
    encoder.tokenize_missing(prepared)
    assert encoder.finish(prepared).token_ids == PromptEncoder(_bundle()).encode(ChatPrompt(_talk(103))).token_ids
    assert encoder.prepare(ChatPrompt(_talk(103))).unseen_characters == 0


def test_the_known_part_of_a_very_long_prompt_is_not_hashed_again() -> None:
    encoder = PromptEncoder(_bundle())
    ids = [index % 400 for index in range(8000 * 16)]
    encoder.keys(encoder.encode(TokenPrompt(ids)), _ROOT, 16)
    encoded = encoder.encode(TokenPrompt([*ids, *range(40)]))
    best_seconds = min(_seconds(encoder, encoded) for _ in range(20))
    assert best_seconds < 0.001  # hashing alone would take about 3 ms


def _seconds(encoder: PromptEncoder, encoded: Any) -> float:
    began = time.perf_counter()
    encoder.keys(encoded, _ROOT, 16)
    return time.perf_counter() - began


def test_the_memo_stays_within_its_bytes_and_stays_right() -> None:
    encoder = PromptEncoder(_bundle(), memo_bytes=60_000)
    for turns in range(1, 40):
        encoded = encoder.encode(ChatPrompt(_talk(turns)))
        assert encoder.keys(encoded, _ROOT, 16) == _expected_keys(encoded.token_ids)
        encoder.check_integrity()
    assert 0 < encoder.memo_bytes_used <= 60_000


def test_storage_of_a_growing_conversation_grows_with_its_length_not_its_square() -> None:
    def used_after(turns: int) -> int:
        encoder = PromptEncoder(_bundle())
        for length in range(1, turns + 1):
            encoder.keys(encoder.encode(ChatPrompt(_talk(length))), _ROOT, 16)
        return encoder.memo_bytes_used

    assert used_after(80) < 2.5 * used_after(40)


def test_unseen_text_can_be_tokenized_in_threads() -> None:
    encoder = PromptEncoder(_bundle())
    prompts = [ChatPrompt([{"role": "user", "content": f"{number % 3} hello " * 300}]) for number in range(12)]
    prepared = [encoder.prepare(prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(encoder.tokenize_missing, prepared))
    ids = [encoder.finish(one).token_ids for one in prepared]
    assert ids == [PromptEncoder(_bundle()).encode(prompt).token_ids for prompt in prompts]


def test_golden_keys_tell_apart_whatever_makes_other_prompts() -> None:
    golden = PromptEncoder(_bundle()).golden_prompt_key(_ROOT, 16)
    assert golden == PromptEncoder(TokenizerBundle.unpack(_bundle().pack())).golden_prompt_key(_ROOT, 16)
    others = [
        PromptEncoder(_bundle()).golden_prompt_key(_ROOT, 32),
        PromptEncoder(_bundle()).golden_prompt_key(namespace_root("other"), 16),
        PromptEncoder(_bundle("byte level with prefix space")).golden_prompt_key(_ROOT, 16),
        *(PromptEncoder(_bundle(template=name)).golden_prompt_key(_ROOT, 16) for name in TEMPLATES if name != "chatml"),
    ]
    assert len({golden, *others}) == 1 + len(others)


def test_a_template_that_asks_for_the_date_has_one_golden_key_for_all_days() -> None:
    bundle = _bundle(template="trimming, with begin token and date")
    assert "Today: 02 Jan 2025" in PromptEncoder(bundle).golden_text(16)


def test_a_bundle_travels_packed_and_damage_is_noticed() -> None:
    bundle = _bundle()
    packed = bundle.pack()
    assert TokenizerBundle.unpack(packed) == bundle
    assert TokenizerBundle.unpack(packed).digest == bundle.digest
    for damaged in (b"", b"wrt1", packed[:-20], b"wrt0" + packed[4:], packed[:50] + b"\x00" + packed[51:]):
        with pytest.raises(BundleError):
            TokenizerBundle.unpack(damaged)
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        PromptEncoder(TokenizerBundle(b"{}", {}))


def test_a_tokenizer_that_fails_on_ordinary_text_is_a_bad_bundle() -> None:
    without_unknown = Tokenizer(models.WordLevel({"hello": 0}, unk_token="<unk>"))
    with pytest.raises(BundleError, match="ordinary text"):
        PromptEncoder(TokenizerBundle(without_unknown.to_str().encode(), {}))


def test_digests_differ_where_bundles_do() -> None:
    bundle = _bundle()
    other_template = TokenizerBundle(bundle.tokenizer_json, bundle.special_tokens, "")
    no_template = TokenizerBundle(bundle.tokenizer_json, bundle.special_tokens, None)
    other_names = TokenizerBundle(bundle.tokenizer_json, {"bos_token": "</s>"}, bundle.chat_template)
    assert len({one.digest for one in (bundle, other_template, no_template, other_names)}) == 4
    assert len({one.template_digest for one in (bundle, other_template, no_template)}) == 3
    same = TokenizerBundle(bundle.tokenizer_json, dict(reversed(bundle.special_tokens.items())), bundle.chat_template)
    assert same.digest == bundle.digest


def test_questions_that_are_asked_once_leave_next_to_nothing_behind() -> None:
    encoder = PromptEncoder(_bundle(), memo_bytes=2**20)
    opening = "shared opening " * 200
    root = namespace_root("f")
    for number in range(1000):
        messages = [{"role": "system", "content": opening}, {"role": "user", "content": f"question {number}"}]
        encoder.keys(encoder.encode(ChatPrompt(messages)), root, 4)
    encoder.check_integrity()
    assert encoder.memo_bytes_used < 2**20 // 4
    assert encoder.prepare(ChatPrompt(messages)).unseen_characters == 0
