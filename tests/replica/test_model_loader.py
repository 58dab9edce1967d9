from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3NextConfig,
)

from replica.model_loader import ModelLoadError, load, weights_digest
from replica.pool_size import available_bytes, block_bytes, pool_blocks
from replica.tiny_model import build_tiny, tiny_weights_id
from replica.tiny_tokenizer import CHAT_TEMPLATE, tiny_bundle, vocabulary
from shared.prompts import ChatPrompt, PromptEncoder
from tests.replica.tiny_zoo import FAMILIES, build

SMALL: dict[str, Any] = {
    "vocab_size": len(vocabulary()),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def save_tokenizer(directory: Path) -> None:
    file = directory / "source.json"
    file.write_bytes(tiny_bundle().tokenizer_json)
    untyped: Any = PreTrainedTokenizerFast
    tokenizer = untyped(tokenizer_file=str(file), bos_token="<|begin|>", eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    file.unlink()


def save(config: PretrainedConfig, directory: Path) -> str:
    torch.manual_seed(0)
    untyped: Any = AutoModelForCausalLM
    untyped.from_config(config).save_pretrained(directory)
    save_tokenizer(directory)
    return str(directory)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save(LlamaConfig.from_dict(SMALL), tmp_path / "model")
    return tmp_path / "model"


def test_tiny_is_there_without_files_or_network() -> None:
    loaded = load("tiny", "cpu")

    assert loaded.weights_id == tiny_weights_id()
    assert loaded.bundle == tiny_bundle()
    assert (loaded.model.dtype, loaded.model.device.type) == (torch.float32, "cpu")
    assert (loaded.context_tokens, loaded.vocabulary_tokens) == (16_384, len(vocabulary()))


def test_a_directory_gives_model_tokenizer_limits_and_every_token_that_ends(llama: Path) -> None:
    generation = json.loads((llama / "generation_config.json").read_text())
    (llama / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [1, 5]}))

    loaded = load(str(llama), "cpu", "bfloat16")

    assert loaded.eos_token_ids == {1, 5}
    assert loaded.context_tokens == 128
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.bundle.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    prompt = ChatPrompt([{"role": "user", "content": "Hello, what is a cache?"}])
    expected = PromptEncoder(tiny_bundle()).encode(prompt).token_ids
    assert PromptEncoder(loaded.bundle).encode(prompt).token_ids == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_the_trial_at_loading_in_every_precision(family: str, dtype: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)

    loaded = load(str(tmp_path), "cpu", dtype)

    assert loaded.model.config.model_type == family
    assert str(loaded.model.dtype) == f"torch.{dtype}"


def test_a_window_as_long_as_the_context_hides_nothing_and_is_no_reason_to_refuse(tmp_path: Path) -> None:
    directory = save(MistralConfig.from_dict(SMALL | {"sliding_window": SMALL["max_position_embeddings"]}), tmp_path)

    assert load(directory, "cpu").context_tokens == SMALL["max_position_embeddings"]


def test_copies_of_a_directory_have_one_weights_id_and_other_weights_another(llama: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(llama, copy)
    os.utime(copy / "config.json", (0, 0))
    (copy / "README.md").write_text("notes are no weights")
    assert weights_digest(copy) == weights_digest(llama) == load(str(llama), "cpu").weights_id

    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-20] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert weights_digest(copy) != weights_digest(llama)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig.from_dict(SMALL | {"sliding_window": 16}), "sliding-window"),
        (Qwen2Config.from_dict(SMALL | {"use_sliding_window": True, "max_window_layers": 1}), "sliding"),
        (Gemma2Config.from_dict(SMALL | {"head_dim": 16}), "sliding"),
        (Gemma2Config.from_dict(SMALL | {"head_dim": 16, "layer_types": ["full_attention"] * 2}), "soft-capped"),
        (
            Qwen3NextConfig.from_dict(SMALL | {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}),
            "linear attention",
        ),
        (
            GptOssConfig.from_dict(
                SMALL
                | {
                    "head_dim": 16,
                    "layer_types": ["full_attention"] * 2,
                    "num_local_experts": 2,
                    "num_experts_per_tok": 2,
                }
            ),
            "sinks",
        ),
        (MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=1), "linear"),
        (BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2), "causal"),
        (
            LlamaConfig.from_dict(
                SMALL | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}}
            ),
            "rotary",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PretrainedConfig) else value,
)
def test_models_that_blocks_cannot_serve_are_refused_with_the_reason(
    config: PretrainedConfig, reason: str, tmp_path: Path
) -> None:
    directory = save(config, tmp_path)

    with pytest.raises(ModelLoadError, match=reason) as refusal:
        load(directory, "cpu")

    assert directory in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_directory_without_all_weights_is_refused_and_not_filled_with_random_ones(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))

    with pytest.raises(ModelLoadError, match="lack 9 of the weights"):
        load(str(llama), "cpu")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_directory_that_is_no_model_is_refused_in_one_line(llama: Path, missing: str) -> None:
    (llama / missing).unlink()

    with pytest.raises(ModelLoadError) as refusal:
        load(str(llama), "cpu")

    assert str(llama) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_truncated_weights_file_is_refused_in_one_line(llama: Path) -> None:
    weights = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(weights[:-100])

    with pytest.raises(ModelLoadError) as refusal:
        load(str(llama), "cpu")

    assert "\n" not in str(refusal.value)


def test_a_path_that_is_not_there_is_not_asked_of_the_hub() -> None:
    with pytest.raises(ModelLoadError, match="/nowhere/at/all: no such directory"):
        load("/nowhere/at/all", "cpu")


def test_a_hub_id_without_a_network_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    with pytest.raises(ModelLoadError, match="offline") as refusal:
        load("nobody/nothing-at-all", "cpu")

    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("device", "dtype", "reason"), [("cuda", "auto", "cuda"), ("cpu", "int3", "bfloat16")])
def test_a_device_or_dtype_that_is_not_there_is_refused(device: str, dtype: str, reason: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ModelLoadError, match=reason):
        load("tiny", device, dtype)


def test_the_pool_is_as_asked_or_a_share_of_the_memory_and_what_does_not_fit_is_refused() -> None:
    model = build_tiny()
    size = block_bytes(model, 16)
    assert size == 2 * 8 * 2 * 64 * 16 * 4
    assert pool_blocks(model, 16, 7) == 7
    assert 0 < pool_blocks(model, 16) * size <= available_bytes(model.device)

    with pytest.raises(ModelLoadError, match="--blocks"):
        pool_blocks(model, 16, 10**9)
    with pytest.raises(ModelLoadError, match="--blocks"):
        pool_blocks(model, 16, 0)
