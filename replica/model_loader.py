"""`tiny`, a directory or a hub id -> a model that this engine can run, with the tokenizer and the name of its weights.

A model that attends in a way that blocks cannot serve is refused here, with the reason, and never runs wrongly:
first by what its configuration says, then by a trial, in which two chunks through the paged attention must give what
the model itself gives for the whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from replica.model_runner import ModelRunner
from replica.paged_attention import UnsupportedAttentionError
from replica.runner import Chunk
from replica.sequence import SamplingParams, Sequence
from replica.tiny_model import build_tiny, tiny_weights_id
from replica.tiny_tokenizer import tiny_bundle
from shared.blocks import BlockKey
from shared.tokenizer_bundle import TokenizerBundle

__all__ = ["LoadedModel", "ModelLoadError", "load", "pick_device", "weights_digest"]

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAMPLE_BYTES = 1024


class ModelLoadError(Exception):
    """The model cannot be had, or cannot be run here. One line that says why."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: PreTrainedModel
    bundle: TokenizerBundle
    weights_id: str
    """Equal on two machines that have the same weights."""
    context_tokens: int
    vocabulary_tokens: int
    eos_token_ids: frozenset[int]


def load(name: str, device: str = "auto", dtype: str = "auto") -> LoadedModel:
    """`device` auto, cpu or cuda; `dtype` auto, float32, bfloat16 or float16. Raises ModelLoadError."""
    on = pick_device(device)
    precision = _pick_dtype(dtype, on)
    loaded = _load_tiny() if name == "tiny" else _load_pretrained(name, precision)
    # `to` of a transformers model is wrapped in an untyped decorator.
    torch.nn.Module.to(loaded.model, device=on, dtype=precision)
    _refuse_unfaithful(name, loaded.model)
    return loaded


def pick_device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("--device cuda: no CUDA device is usable here; use cpu or auto")
    return torch.device(device)


def _pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in _DTYPES:
        raise ModelLoadError(f"--dtype {dtype}: choose auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _load_tiny() -> LoadedModel:
    model = build_tiny()
    return _describe(model, tiny_bundle(), tiny_weights_id())


def _load_pretrained(name: str, dtype: torch.dtype) -> LoadedModel:
    directory = Path(name).expanduser()
    is_local = directory.is_dir()
    if not is_local and not _HUB_ID.fullmatch(name):
        raise ModelLoadError(f"model {name}: no such directory; give tiny, a directory or a hub id like owner/name")
    source = str(directory) if is_local else name
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(source)
        _forget_unused_window(config)
        _refuse_unsupported(config)
        tokenizer = AutoTokenizer.from_pretrained(source)
        with_report: Any = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=dtype, output_loading_info=True
        )
        model, loading = with_report
        if loading["missing_keys"]:  # transformers would go on with random numbers
            raise ModelLoadError(f"its files lack {len(loading['missing_keys'])} of the weights that it needs")
    except ModelLoadError as error:
        raise ModelLoadError(f"model {name}: {error}") from None
    except Exception as error:  # whatever strangers' files provoke in three libraries
        raise ModelLoadError(_explain(name, is_local, error)) from error
    model.requires_grad_(False).train(False)
    commit = getattr(config, "_commit_hash", None) or "main"
    weights_id = weights_digest(directory) if is_local else f"{name}@{commit}"
    return _describe(model, _bundle_of(name, tokenizer), weights_id)


def _explain(name: str, is_local: bool, error: Exception) -> str:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if is_local:
        return f"model {name}: {reason}"
    return f"model {name}: no such directory, and the hub does not give it (offline, or unknown there): {reason}"


def _describe(model: PreTrainedModel, bundle: TokenizerBundle, weights_id: str) -> LoadedModel:
    ends: set[int] = set()
    for config in (model.config, model.generation_config):
        eos: int | list[int] | None = getattr(config, "eos_token_id", None)
        ends.update([eos] if isinstance(eos, int) else eos or [])
    return LoadedModel(
        model=model,
        bundle=bundle,
        weights_id=weights_id,
        context_tokens=model.config.max_position_embeddings,
        vocabulary_tokens=model.config.vocab_size,
        eos_token_ids=frozenset(ends),
    )


def _bundle_of(name: str, tokenizer: Any) -> TokenizerBundle:
    if not getattr(tokenizer, "is_fast", False):
        raise ModelLoadError(f"model {name}: its tokenizer has no fast version (tokenizer.json), which routers need")
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several named ones
        template = template.get("default")
    return TokenizerBundle(
        tokenizer_json=backend.to_str().encode(),
        special_tokens={key: token for key, token in tokenizer.special_tokens_map.items() if isinstance(token, str)},
        chat_template=template,
    )


def weights_digest(directory: Path) -> str:
    """A digest of config.json and of the weights: names, sizes, and a sample of their content.

    The sample of a safetensors file is its header (every tensor's name, shape, dtype and place) and the first KiB of
    every tensor: what training or merging touches changes it, at a cost of milliseconds. Files that differ only
    beyond a tensor's first KiB are not told apart. Other weight files are read whole. No path, no time of
    modification: copies of a directory have one digest.
    """
    digest = hashlib.blake2b(digest_size=16)
    files = sorted(path for path in directory.iterdir() if path.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    for path in (directory / "config.json", *files):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            for piece in _sample(file) if path.suffix == ".safetensors" else iter(lambda: file.read(1 << 20), b""):
                digest.update(piece)
    return digest.hexdigest()


def _sample(file: BinaryIO) -> Iterator[bytes]:
    """A safetensors file is: 8 bytes with the length of the header, the header in JSON, the tensors."""
    length = file.read(8)
    header = file.read(int.from_bytes(length, "little"))
    yield length + header
    tensors_start = file.tell()
    for name, tensor in sorted(json.loads(header).items()):
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            file.seek(tensors_start + begin)
            yield file.read(min(_SAMPLE_BYTES, end - begin))


def _forget_unused_window(config: PretrainedConfig) -> None:
    """A window as long as the longest context hides nothing."""
    window, context = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    if window and context and window >= context and not getattr(config, "layer_types", None):
        config.sliding_window = None


def _refuse_unsupported(config: PretrainedConfig) -> None:
    """What a configuration tells before gigabytes are read; the trial after loading finds the rest."""
    kinds = {kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"}
    rope = getattr(config, "rope_parameters", None) or {}
    reasons = {
        "it is an encoder-decoder model": config.is_encoder_decoder,
        f"some of its layers use {', '.join(sorted(kinds)).replace('_', ' ')}": kinds,
        "sliding-window attention": getattr(config, "sliding_window", None)
        and getattr(config, "use_sliding_window", True)
        and not getattr(config, "layer_types", None),
        "soft-capped attention scores": getattr(config, "attn_logit_softcapping", None),
        # Keys in the cache would have been turned by other angles than the keys of a longer context need.
        f"rotary embeddings that change with the length ({rope.get('rope_type')})": rope.get("rope_type")
        in ("dynamic", "longrope"),
        "no length of its context (max_position_embeddings)": not getattr(config, "max_position_embeddings", None),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ModelLoadError(f"this engine's block cache cannot serve it: {reason}")


def _refuse_unfaithful(name: str, model: PreTrainedModel) -> None:
    """The trial: five tokens as a chunk of three and a chunk of two. Leaves the model as it was."""
    own_attention = model.config._attn_implementation
    tokens = [index % model.config.vocab_size for index in range(5, 10)]
    sequence = Sequence("trial", tokens, len(tokens), SamplingParams(max_tokens=1), BlockKey(b""), block_ids=[1, 0])
    try:
        with torch.inference_mode():
            expected = model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0, -1].float()
        runner = ModelRunner(model, num_blocks=2, block_size=4)
        runner.logits([Chunk(sequence, 0, 3)])
        logits = runner.logits([Chunk(sequence, 3, 5)])[0].float()
    except UnsupportedAttentionError as error:
        raise ModelLoadError(f"model {name}: this engine's block cache cannot serve it: {error}") from error
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ModelLoadError(f"model {name}: {type(model).__name__} does not fit this engine: {error}") from error
    finally:
        model.set_attn_implementation(own_attention)
    allowed = (1e-3 if model.dtype == torch.float32 else 0.1) * float(expected.std())
    # On average over the vocabulary: the largest of many differences grows with their number.
    difference = float((logits - expected).square().mean().sqrt())
    if not difference <= allowed:
        raise ModelLoadError(
            f"model {name}: {type(model).__name__} does not fit this engine: computed in chunks, its logits differ by "
            f"{difference:.2g}"
        )
