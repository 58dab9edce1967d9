"""The checks of `make gpu-check`, run on a CPU with a plain function in the kernel's place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from loadtest import gpu_check
from loadtest.benches import tiers
from replica import attention_varlen, model_runner
from replica.attention_varlen import VarlenAttention
from tests.replica.plain_varlen import plain_varlen

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_varlen, "_kernel", plain_varlen)
    monkeypatch.setattr(model_runner, "attention_for", lambda pool: VarlenAttention)


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("queries", [1, 40])
def test_the_kernel_check_passes_with_a_right_kernel(block_size: int, queries: int) -> None:
    assert gpu_check.check_kernel(CPU, "bfloat16", block_size, queries).passed


def test_the_kernel_check_fails_with_a_kernel_that_reads_the_wrong_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*arguments: torch.Tensor, block_table: torch.Tensor, **others: object) -> torch.Tensor:
        return plain_varlen(*arguments, block_table=block_table.roll(1, 1), **others)  # type: ignore[arg-type]

    monkeypatch.setattr(attention_varlen, "_kernel", shifted)

    assert not gpu_check.check_kernel(CPU, "float16", 256, 1).passed


def test_the_checks_of_answers_pass_with_a_right_kernel() -> None:
    checks = gpu_check.check_answers(CPU, "float32", 256, requests=3, tokens=6)

    assert [check for check in checks if not check.passed] == []
    assert checks[-1].found == "100%"


def test_the_transfers_of_a_model_made_here_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_LONGEST_TOKENS", 1024)
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    model = gpu_check.save_model(
        tmp_path / "model", CPU, num_hidden_layers=1, **dict(zip(sizes, (32, 32, 2, 1), strict=True))
    )

    checks = gpu_check.check_transfers(CPU, tmp_path, Console(), model, repeats=1)

    assert len(checks) == 6
    assert "hot against cold, 513 tokens, blocks of 256" in [check.name for check in checks]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_check_says_so_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.run() == 0
    assert capsys.readouterr().out == "gpu-check: skipped, there is no CUDA device here\n"
