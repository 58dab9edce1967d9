from __future__ import annotations

import subprocess
import sys
import time

import pytest

from replica.runner import Chunk
from replica.simulated_runner import SimulatedCost, SimulatedRunner
from tests.replica.pool_runner import make_sequence


def chunk(tokens: list[int], start: int = 0, end: int | None = None) -> Chunk:
    return Chunk(make_sequence(tokens), start, len(tokens) if end is None else end)


def test_the_next_token_depends_on_the_sequence_alone() -> None:
    one = SimulatedRunner(8, 4, virtual=True)
    other = SimulatedRunner(100, 16, virtual=True)
    alone = one.execute([chunk([1, 2, 3])]).sampled
    batched = other.execute([chunk([7, 8]), chunk([1, 2, 3], start=2), chunk([5] * 9)]).sampled
    assert batched[1] == alone[0]


def test_only_a_chunk_that_reaches_the_end_yields_a_token() -> None:
    sampled = SimulatedRunner(8, 4, virtual=True).execute([chunk([1, 2, 3], end=2), chunk([1, 2, 3])]).sampled
    assert sampled[0] is None
    assert sampled[1] is not None


def test_answers_are_made_of_the_given_vocabulary() -> None:
    runner = SimulatedRunner(8, 4, vocab=(41, 42, 43), virtual=True)
    said = {runner.execute([chunk([n])]).sampled[0] for n in range(60)}
    assert said == {41, 42, 43}
    with pytest.raises(ValueError, match="at least one token"):
        SimulatedRunner(8, 4, vocab=())


def test_a_step_costs_what_the_model_says() -> None:
    cost = SimulatedCost(
        base_seconds=1.0, per_token_seconds=0.1, per_token_context_seconds=0.001, per_decode_seconds=0.01
    )
    prefill, decode = chunk(list(range(30)), start=10), chunk(list(range(50)), start=49)
    attended = sum(position + 1 for position in range(10, 30)) + 50
    assert cost.step_seconds([prefill, decode]) == pytest.approx(1.0 + 20 * 0.1 + 0.01 + attended * 0.001)


def test_virtual_time_passes_without_waiting() -> None:
    runner = SimulatedRunner(8, 4, SimulatedCost(base_seconds=3600), virtual=True)
    assert runner.execute([chunk([1])]).seconds > 3599


def test_real_time_is_kept_on_the_average_although_each_wake_up_is_late() -> None:
    runner = SimulatedRunner(8, 4, SimulatedCost(base_seconds=0.004))
    began = time.perf_counter()
    seconds = sum(runner.execute([chunk([n])]).seconds for n in range(50))
    took = time.perf_counter() - began
    # Late by one wake-up in total, not by one each; the upper bound leaves room for a busy machine.
    assert 0.98 * seconds < took < 2 * seconds


def test_a_simulated_replica_needs_no_torch() -> None:
    program = (
        "import sys, replica.engine, replica.simulated_runner;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
