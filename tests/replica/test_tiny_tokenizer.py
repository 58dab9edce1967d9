from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from replica.tiny_tokenizer import SPECIAL_TOKENS, tiny_bundle, vocabulary, word_token_ids
from shared.prompts import ChatPrompt, PromptEncoder, PromptError

TOKENIZER = Tokenizer.from_str(tiny_bundle().tokenizer_json.decode())
ENCODER = PromptEncoder(tiny_bundle())
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


def rendered(*messages: Mapping[str, object], **options: object) -> str:
    ids = ENCODER.encode(ChatPrompt(messages, **options)).token_ids  # type: ignore[arg-type]
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def test_every_process_builds_the_same_bundle_without_torch() -> None:
    program = (
        "import sys; from replica.tiny_tokenizer import tiny_bundle;"
        "assert 'torch' not in sys.modules; sys.stdout.write(tiny_bundle().digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }

    assert digests == {tiny_bundle().digest}


def test_the_bundle_is_the_one_that_running_fleets_know() -> None:
    # Replicas of two releases share keys only as long as this holds: change it knowingly.
    assert tiny_bundle().digest == "1ed2f585d4442b92c4bd59e6f1b90116"


def test_ids_are_dense_and_begin_with_the_special_tokens() -> None:
    assert sorted(vocabulary().values()) == list(range(len(vocabulary())))
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert 2000 < len(vocabulary()) < 4000


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_english_takes_few_tokens() -> None:
    text = "Please explain the policy for a customer who did not receive the order and wants the money back."

    assert len(TOKENIZER.encode(text).ids) < len(text) / 4


def test_text_made_of_word_tokens_has_exactly_these_tokens() -> None:
    assert len(word_token_ids()) > 1000
    ids = random.Random(0).choices(word_token_ids(), k=5000)

    assert TOKENIZER.encode(TOKENIZER.decode(ids)).ids == ids


def test_a_chat_is_written_turn_by_turn() -> None:
    assert rendered(SYSTEM, USER) == "<|begin|><|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>"


def test_a_longer_conversation_only_appends() -> None:
    first = rendered(SYSTEM, USER, tools=[TOOL])
    answer = {"role": "assistant", "content": " the way"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    result = {"role": "tool", "tool_call_id": "1", "content": "42"}
    parts = {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "now?"}]}
    second = rendered(SYSTEM, USER, answer, parts, tools=[TOOL])
    third = rendered(SYSTEM, USER, answer, parts, call, result, USER, tools=[TOOL])

    assert second.startswith(first + " the way<|end|><|user|>And now?")
    assert third.startswith(second)
    assert "look_up" in first
    assert "<|tool|>42<|end|>" in third


def test_a_final_message_can_be_continued() -> None:
    opened = {"role": "assistant", "content": "It is"}

    assert rendered(USER, opened, add_generation_prompt=False, continue_final_message=True).endswith(
        "<|assistant|>It is"
    )


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "king", "content": "x"}, "king"),
        ({"role": "user", "content": [{"type": "image"}]}, "image"),
    ],
)
def test_what_the_model_cannot_read_is_refused(message: Mapping[str, object], reason: str) -> None:
    with pytest.raises(PromptError, match=reason):
        rendered(message)
