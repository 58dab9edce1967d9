"""Small random models of every family that is served, and an engine around one: the real scheduler and cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Items
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from replica.block_moves import carry_out
from replica.model_runner import ModelRunner
from replica.paged_attention import Attention
from replica.prefix_cache import PrefixCache
from replica.scheduler import Scheduler
from replica.sequence import FinishReason, SamplingParams, Sequence
from shared.blocks import BlockKey

__all__ = ["FAMILIES", "ROOT", "SmallEngine", "build", "generate", "make_prompt", "make_sequence"]

torch.set_num_threads(1)

ROOT = BlockKey(b"r" * 16)
VOCABULARY = 199
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt2")
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Larger than usual: logits that lie far apart leave no near-ties for rounding to decide.
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_numbers = itertools.count()


def build(family: str) -> PreTrainedModel:
    """The same weights each time."""
    torch.manual_seed(7)
    model: PreTrainedModel
    match family:
        case "llama":
            model = LlamaForCausalLM(LlamaConfig.from_dict(_COMMON))
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config.from_dict(_COMMON))
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config.from_dict(_COMMON | {"head_dim": 24}))
        case "mistral":
            model = MistralForCausalLM(MistralConfig.from_dict(_COMMON | {"sliding_window": None}))
        case "gpt2":
            model = GPT2LMHeadModel(GPT2Config.from_dict(_COMMON | {"num_key_value_heads": None}))
        case _:
            raise ValueError(family)
    model.requires_grad_(False).train(False)
    return model


def make_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
    return tokens


def make_sequence(tokens: Items[int], max_tokens: int = 8, **params: Any) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, **({"temperature": 0.0} | params))
    return Sequence(f"request-{next(_numbers)}", list(tokens), len(tokens), sampling, ROOT)


def generate(model: PreTrainedModel, prompt: Items[int], max_tokens: int) -> list[int]:
    """What transformers' own `generate` says, greedily, cache and all."""
    inputs = torch.tensor([list(prompt)])
    output = model.generate(  # type: ignore[operator]  # typed as a tensor, for nn.Module's sake
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


class SmallEngine:
    """Runner, prefix cache and scheduler, stepped by hand; every step ends with the cache's integrity check."""

    def __init__(
        self,
        model: PreTrainedModel,
        num_blocks: int = 64,
        block_size: int = 4,
        token_budget: int = 64,
        *,
        finer: bool = False,
        host_blocks: int = 0,
        attention: type[Attention] | None = None,
    ) -> None:
        self.runner = ModelRunner(model, num_blocks, block_size, host_blocks, attention)
        self.cache = PrefixCache(num_blocks, block_size, finer=finer, host_blocks=host_blocks)
        self.scheduler = Scheduler(self.cache, token_budget, max_running=16, max_waiting=64)

    def step(self) -> None:
        chunks = self.scheduler.schedule()
        assert chunks, "the scheduler has work but schedules none"
        carry_out(self.runner, self.cache.take_moves())
        self.scheduler.commit(chunks, self.runner.execute(chunks))
        self.scheduler.check_integrity()

    def run(self, *sequences: Sequence) -> list[list[int]]:
        """Answers, when all have ended."""
        for sequence in sequences:
            self.scheduler.add(sequence)
        while self.scheduler.has_work:
            self.step()
        assert all(sequence.finish_reason is FinishReason.LENGTH for sequence in sequences)
        return [sequence.tokens[sequence.prompt_tokens :] for sequence in sequences]
