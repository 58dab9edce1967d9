"""The model `tiny`: a Llama of 15 million parameters made from a fixed seed, for demos and tests without a download.

Its weights are random but not careless. It answers with the words of its tokenizer's list, each one token that comes
back as the same token when the answer is sent again, and it ends an answer after some hundred words:

    residual stream   [ 1 | opens an answer? | 382 numbers, as random as in any fresh model ]

No layer writes to the first two dimensions. The first is constant, so the output row of every word can have a bonus
there and all other rows a malus. The second is set by the token that opens an answer alone: never end right there.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from replica.tiny_tokenizer import BEGIN, END, SPECIAL_TOKENS, vocabulary, word_token_ids

__all__ = ["build_tiny", "tiny_weights_id"]

_SEED = 20260
_SHAPE: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16_384,
}
# Standard deviations, in units of 1/sqrt(inputs). Sharp attention keeps the text from running in circles, and quiet
# layers keep it tied to the last token; both were chosen by looking at greedy answers.
_SPREAD = {"q_proj": 3.0, "k_proj": 3.0, "o_proj": 0.5, "down_proj": 0.5, "lm_head": 3.0}
_CONSTANT = 4.0
_WORD_BONUS = 5.0
_END_BONUS = 1.0


def tiny_weights_id() -> str:
    """Equal exactly where `build_tiny` makes equal weights."""
    recipe = [_SEED, _SHAPE, _SPREAD, _CONSTANT, _WORD_BONUS, _END_BONUS, list(vocabulary())]
    return "tiny-" + hashlib.blake2b(json.dumps(recipe).encode(), digest_size=8).hexdigest()


def build_tiny() -> LlamaForCausalLM:
    """In float32 on the CPU, ready for inference. The same bits on every machine, whatever its number of threads."""
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        bos_token_id=SPECIAL_TOKENS.index(BEGIN),
        eos_token_id=SPECIAL_TOKENS.index(END),
        tie_word_embeddings=False,
        **_SHAPE,
    )
    model = LlamaForCausalLM(config)
    model.requires_grad_(False).train(False)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:  # the others scale norms, and stay 1
            _fill(name, weight)
    _steer(model)
    return model


def _fill(name: str, weight: torch.Tensor) -> None:
    # A seed for each name: the order in which a release of transformers lists its parameters is its own business.
    seed = hashlib.blake2b(f"{_SEED}/{name}".encode(), digest_size=6).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "little"))
    # Uniform numbers are exact arithmetic on the generator's integers; normal ones go through log and cos, whose last
    # bits differ between processors.
    layer = name.split(".")[-2]
    spread = 1.0 if layer == "embed_tokens" else _SPREAD.get(layer, 1.0) / weight.shape[1] ** 0.5
    weight.copy_(torch.rand(weight.shape, generator=generator).sub_(0.5).mul_(spread * 12**0.5))
    if layer in ("o_proj", "down_proj"):
        weight[:2] = 0


def _steer(model: LlamaForCausalLM) -> None:
    end, opens_answer = SPECIAL_TOKENS.index(END), SPECIAL_TOKENS.index("<|assistant|>")
    embedding = cast(torch.Tensor, model.model.embed_tokens.weight)
    embedding[:, 0] = _CONSTANT
    embedding[:, 1] = 0
    embedding[opens_answer, 1] = _CONSTANT
    head = cast(torch.Tensor, model.lm_head.weight)
    head[:, 0] = -_WORD_BONUS
    head[word_token_ids(), 0] = _WORD_BONUS
    head[end, 0] = _WORD_BONUS + _END_BONUS
    head[:, 1] = 0
    head[end, 1] = -2 * _WORD_BONUS
