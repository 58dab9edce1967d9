"""`make gpu-check`: does the engine do on a GPU what its tests show on a CPU? A few minutes, a table, a verdict.

    kernel       varlen_attn over the paged pool, against the gathered reference in single precision
    answers      the engine against transformers in half precision: logits of the same tokens, and greedy answers
    transfers    time to first token cold, from pinned host memory, and hot; and from which length each is worth it

Everything is made here from a seed: nothing is downloaded. Without a GPU it says so and ends well.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from loadtest.benches import tiers
from loadtest.benches.report import BenchReport
from loadtest.benches.stepped_engine import SteppedEngine
from replica.attention_gathered import GatheredAttention
from replica.attention_varlen import VarlenAttention, serves
from replica.kv_pool import KVPool, KVShape
from replica.model_loader import load
from replica.model_runner import ModelRunner
from replica.runner import Chunk
from replica.sequence import SamplingParams, Sequence
from replica.tiny_tokenizer import tiny_bundle
from shared.blocks import BlockKey
from shared.settings import BenchSettings

__all__ = ["Check", "check_answers", "check_kernel", "check_transfers", "run", "save_model"]

_HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_KERNEL_TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}
_LOGITS_TOLERANCE = 0.1
"""Largest difference, in standard deviations of the logits: what a model is refused for at loading."""
_AGREEMENT = 0.75
"""Share of greedy tokens before the first difference. Half precision decides near-ties by rounding."""
_HEADS, _SHAPE = 16, KVShape(layers=1, kv_heads=4, head_dim=64)


class Check(NamedTuple):
    name: str
    found: str
    asked: str
    passed: bool


def run() -> int:
    if not torch.cuda.is_available():
        sys.stdout.write("gpu-check: skipped, there is no CUDA device here\n")
        return 0
    if torch.cuda.get_device_capability() < (8, 0):
        sys.stdout.write(
            "gpu-check: skipped, this GPU is too old for the kernel (Ampere or newer); contexts are gathered\n"
        )
        return 0
    console = Console(width=140)
    device = torch.device("cuda")
    checks = [
        check_kernel(device, dtype, block_size, queries)
        for dtype in _HALF
        for block_size in (16, 256)
        for queries in (1, 40)
    ]
    for dtype in _HALF:
        for block_size in (16, 256):
            checks += check_answers(device, dtype, block_size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checks += check_transfers(device, folder, console, save_model(folder / "model", device))
    report = BenchReport("gpu-check", "reports", console)
    report.table(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        ("check", "found", "asked", ""),
        [(check.name, check.found, check.asked, "ok" if check.passed else "FAILED") for check in checks],
    )
    failed = [check.name for check in checks if not check.passed]
    verdict = f"{len(failed)} of {len(checks)} checks failed: {'; '.join(failed)}" if failed else "all checks passed"
    sys.stdout.write(f"gpu-check: {verdict}\n")
    return 1 if failed else 0


def check_kernel(device: torch.device, dtype: str, block_size: int, queries: int) -> Check:
    """Nine sequences with shuffled blocks, the first of them shared by all."""
    blocks, contexts = 9 * 8 * (256 // block_size) + 1, [100 + 211 * number for number in range(9)]
    free = list(range(1, blocks))
    Random(1).shuffle(free)
    chunks = []
    for number, context in enumerate(contexts):
        table = [0, *(free.pop() for _ in range(-(-context // block_size) - 1))]
        chunks.append(_chunk(f"k{number}", context, queries, table))
    generator = torch.Generator(device).manual_seed(2)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(_HALF[dtype])

    kv_size = (1, _SHAPE.kv_heads, blocks * block_size, _SHAPE.head_dim)
    query, key, value = numbers(1, _HEADS, 9 * queries, _SHAPE.head_dim), numbers(*kv_size), numbers(*kv_size)
    outputs = []
    for kind, precision in ((VarlenAttention, _HALF[dtype]), (GatheredAttention, torch.float32)):
        pool = KVPool(_SHAPE, blocks, block_size, precision, device, heads_first=False)
        slots = torch.arange(blocks * block_size, device=device)
        q, k, v = (each.to(precision) for each in (query, key, value))
        pool.write(0, slots, k, v)
        # Keys and values of the step itself are in the pool already; only their number of heads is looked at.
        outputs.append(kind(pool, chunks).attend(0, q, k[:, :, : 9 * queries], v[:, :, : 9 * queries], None).float())
    difference = float((outputs[0] - outputs[1]).abs().max())
    name = f"kernel, {dtype}, blocks of {block_size}, {queries} queries each"
    return Check(name, f"{difference:.1e}", f"< {_KERNEL_TOLERANCE[dtype]:.0e}", difference < _KERNEL_TOLERANCE[dtype])


def check_answers(
    device: torch.device, dtype: str, block_size: int, requests: int = 8, tokens: int = 48
) -> list[Check]:
    """`tiny`, prompts behind one beginning, which is cached when they come; answers of `tokens`."""
    ours, theirs = (load("tiny", device.type, dtype).model for _ in range(2))
    runner = ModelRunner(ours, requests * max(1024 // block_size, 4), block_size)
    if device.type == "cuda":
        assert serves(KVPool(_SHAPE, 1, block_size, ours.dtype, device)), "the kernel is what is to be checked"
    rng = Random(3)
    beginning = [rng.randrange(1000) for _ in range(280)]
    prompts = [beginning + [rng.randrange(1000) for _ in range(20 + 7 * number)] for number in range(requests)]
    engine = SteppedEngine(runner)
    engine.serve([beginning], 1)
    answers = engine.serve(prompts, tokens).answers
    agreement = sum(map(_agreement, answers, (_generate(theirs, prompt, tokens) for prompt in prompts))) / len(prompts)

    deviations = []
    for prompt in prompts[:2]:  # in two chunks, the second over what the first left in the pool
        table = list(range(-(-len(prompt) // block_size)))
        whole = _chunk("t", len(prompt), 30, table, prompt)
        runner.logits([replace(whole, start=0, end=whole.start)])
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt], device=device), use_cache=False).logits[0, -1].float()
        difference = (runner.logits([whole])[0].float() - expected).abs().max()
        deviations.append(float(difference / expected.std()))
    where = f"{dtype}, blocks of {block_size}"
    worst = max(deviations)
    return [
        Check(f"logits, {where}", f"{worst:.3f} sd", f"< {_LOGITS_TOLERANCE} sd", worst < _LOGITS_TOLERANCE),
        Check(f"greedy answers, {where}", f"{agreement:.0%}", f"> {_AGREEMENT:.0%}", agreement > _AGREEMENT),
    ]


def check_transfers(device: torch.device, folder: Path, console: Console, model: str, repeats: int = 5) -> list[Check]:
    checks = []
    for block_size in (16, 256):
        settings = BenchSettings(
            name="tiers", repeats=repeats, model=model, device=device.type, block_size=block_size, out=str(folder)
        )
        name = f"tiers-{block_size}"
        tiers.run(settings, BenchReport(name, settings.out, console))
        results = json.loads((folder / name / "results.json").read_text())
        tokens, ways = list(results["seconds"].items())[-1]
        cold, host, hot = (ways[way][0] for way in ("cold", "host", "device"))
        where = f"{tokens} tokens, blocks of {block_size}"
        checks += [
            Check(f"hot against cold, {where}", f"{cold / hot:.1f} x", "> 1.5 x", cold > 1.5 * hot),
            Check(f"from host memory against cold, {where}", f"{cold / host:.1f} x", "is told", passed=True),
            Check(
                f"crossover, blocks of {block_size}", f"{results['crossover_tokens']} tokens", "is told", passed=True
            ),
        ]
    return checks


def save_model(directory: Path, device: torch.device, **shape: int) -> str:
    """A Llama of about 0.5 billion random parameters: enough that a prefill is more than the launch of its kernels."""
    sizes = {
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
    }
    config = LlamaConfig.from_dict({"vocab_size": 8192, "max_position_embeddings": 16_384} | sizes | shape)
    torch.manual_seed(4)
    with device:
        model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(directory)
    file = directory / "source.json"
    file.write_bytes(tiny_bundle().tokenizer_json)
    untyped: Any = PreTrainedTokenizerFast
    untyped(tokenizer_file=str(file)).save_pretrained(directory)
    file.unlink()
    return str(directory)


def _chunk(name: str, context: int, queries: int, table: list[int], tokens: list[int] | None = None) -> Chunk:
    params = SamplingParams(max_tokens=1)
    sequence = Sequence(name, tokens or [1] * context, context, params, BlockKey(b""), block_ids=table)
    return Chunk(sequence, context - queries, context)


def _generate(model: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    inputs = torch.tensor([prompt], device=model.device)
    untyped: Any = model
    output = untyped.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


def _agreement(left: list[int], right: list[int]) -> float:
    """How much of the answers is equal before they first differ."""
    return next(
        (index for index, pair in enumerate(zip(left, right, strict=True)) if len({*pair}) > 1), len(left)
    ) / len(left)


if __name__ == "__main__":
    sys.exit(run())
