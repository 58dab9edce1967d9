from __future__ import annotations

import random

import pytest

from replica.runner import Chunk
from replica.simulated_runner import SimulatedCost
from replica.step_meter import StepMeter
from tests.replica.pool_runner import make_sequence

COST = SimulatedCost(base_seconds=0.01, per_token_seconds=2e-4, per_token_context_seconds=3e-8, per_decode_seconds=2e-4)


def a_step(rng: random.Random) -> list[Chunk]:
    """Some decodes, sometimes a prefill."""
    chunks = []
    for _ in range(rng.randint(1, 6)):
        context = rng.randint(1, 4_000)
        chunks.append(Chunk(make_sequence([1] * context), context - 1, context))
    if rng.random() < 0.3:
        start = rng.randint(0, 4_000)
        chunks.append(Chunk(make_sequence([1]), start, start + rng.randint(2, 512)))
    return chunks


def test_the_coefficients_of_a_noisy_engine_are_found() -> None:
    rng = random.Random(3)
    meter = StepMeter()
    for _ in range(400):
        chunks = a_step(rng)
        meter.observe(chunks, COST.step_seconds(chunks) * rng.gauss(1, 0.05))
    found = meter.coefficients()
    assert found is not None
    assert found.base_seconds == pytest.approx(COST.base_seconds, rel=0.15)
    assert found.per_token_seconds == pytest.approx(COST.per_token_seconds, rel=0.15)
    assert found.per_token_context_seconds == pytest.approx(COST.per_token_context_seconds, rel=0.3)


def test_an_engine_that_became_slower_is_noticed() -> None:
    rng = random.Random(4)
    meter = StepMeter()
    for slowness in (1, 3):
        for _ in range(2_000):
            chunks = a_step(rng)
            meter.observe(chunks, COST.step_seconds(chunks) * slowness)
    found = meter.coefficients()
    assert found is not None
    assert found.per_token_seconds == pytest.approx(3 * COST.per_token_seconds, rel=0.1)


def test_nothing_is_said_before_steps_of_different_sizes_were_seen() -> None:
    meter = StepMeter()
    for _ in range(100):
        meter.observe([Chunk(make_sequence([1] * 50), 49, 50)], 0.01)
    assert meter.coefficients() is None


def test_no_coefficient_is_negative_whatever_was_measured() -> None:
    rng = random.Random(5)
    for _ in range(50):
        meter = StepMeter()
        for _ in range(20):
            meter.observe(a_step(rng), rng.random())
        found = meter.coefficients()
        assert found is not None
        assert min(found.base_seconds, found.per_token_seconds, found.per_token_context_seconds) >= 0
