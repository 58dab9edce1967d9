from __future__ import annotations

import hashlib
from typing import Any

import torch

from replica.tiny_model import build_tiny, tiny_weights_id
from replica.tiny_tokenizer import END, SPECIAL_TOKENS, tiny_bundle, vocabulary, word_token_ids
from shared.prompts import ChatPrompt, PromptEncoder
from tests.replica.tiny_zoo import SmallEngine, make_sequence

ENCODER = PromptEncoder(tiny_bundle())
QUESTIONS = ("Hello", "What is a cache?", "Write a poem.", "Explain the refund policy to me.", "2 + 2 = ?")
END_ID = SPECIAL_TOKENS.index(END)


def weights_digest() -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in sorted(build_tiny().named_parameters()):
        digest.update(name.encode() + weight.numpy().tobytes())
    return digest.hexdigest()


def answers(**params: Any) -> list[list[int]]:
    engine = SmallEngine(build_tiny(), num_blocks=200, block_size=16)
    prompts = [ENCODER.encode(ChatPrompt([{"role": "user", "content": question}])).token_ids for question in QUESTIONS]
    return engine.run(*(make_sequence(prompt, 60, **params) for prompt in prompts))


def test_weights_are_the_same_bits_whatever_the_threads_and_the_global_seed() -> None:
    # The digest is of this recipe on any machine; it may only change together with the weights id.
    assert tiny_weights_id() == "tiny-7cd7f83860e29fde"
    torch.manual_seed(123)
    torch.set_num_threads(2)
    try:
        assert weights_digest() == "2d928a2e9d541ef2abb0df2670428ad6"
    finally:
        torch.set_num_threads(1)


def test_it_is_small_has_a_long_context_and_fits_its_tokenizer() -> None:
    model = build_tiny()

    assert 10e6 < model.num_parameters() < 30e6
    assert model.config.max_position_embeddings >= 8192
    assert model.config.vocab_size == len(vocabulary())
    assert model.config.eos_token_id == END_ID


def test_greedy_answers_are_varied_and_come_back_as_the_same_tokens() -> None:
    for answer in answers():
        text = ENCODER.decode(answer)
        assert len(set(answer)) > 30
        if END_ID not in answer:
            assert list(ENCODER.encode(ChatPrompt([{"role": "user", "content": text}])).token_ids[2:-2]) == answer


def test_sampled_answers_hold_only_words_end_some_time_and_never_before_they_began() -> None:
    words = {*word_token_ids(), END_ID}
    sampled = [answer for seed in range(2) for answer in answers(temperature=1.0, seed=seed)]

    assert all(set(answer) <= words for answer in sampled)
    assert all(answer[0] != END_ID for answer in sampled)
    assert any(END_ID in answer for answer in sampled)
