"""Coefficients are sane before any data, found from data, and not thrown off by outliers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cost_model import DEFAULT_COST, CostModel, service_seconds
from shared.fleet_state import CostCoefficients

TRUE_COST = CostCoefficients(base_seconds=0.02, per_token_seconds=4e-5, per_token_context_seconds=3e-9)
SLOW_COST = CostCoefficients(base_seconds=0.05, per_token_seconds=3e-3, per_token_context_seconds=1e-7)


def learn(truth: CostCoefficients, samples: int, *, outliers: float = 0.0, seed: int = 0) -> CostModel:
    rng, model = random.Random(seed), CostModel()
    for _ in range(samples):
        prompt = rng.randrange(50, 8000)
        uncached = max(1, int(prompt * rng.random()))
        seconds = service_seconds(truth, uncached, prompt) * rng.uniform(0.95, 1.05)
        model.observe("gpu", uncached, prompt, seconds * (50 if rng.random() < outliers else 1))
    return model


def worst_error(model: CostModel, truth: CostCoefficients) -> float:
    found = model.coefficients("gpu")
    return max(
        abs(service_seconds(found, u, prompt) / service_seconds(truth, u, prompt) - 1)
        for u, prompt in [(500, 500), (500, 8000), (4000, 4000), (8000, 8000), (2000, 6000)]
    )


def test_without_data_a_class_costs_the_default_and_published_coefficients_come_first() -> None:
    model = CostModel()
    assert model.coefficients("gpu") == DEFAULT_COST


@pytest.mark.parametrize("truth", [TRUE_COST, SLOW_COST], ids=["fast", "slow"])
def test_the_coefficients_are_found_from_first_token_times(truth: CostCoefficients) -> None:
    assert worst_error(learn(truth, 300), truth) < 0.1


def test_outliers_do_not_throw_it_off() -> None:
    assert worst_error(learn(TRUE_COST, 600, outliers=0.05), TRUE_COST) < 0.25


def test_it_follows_a_replica_class_that_changes_its_speed() -> None:
    model = learn(TRUE_COST, 300)
    rng = random.Random(1)
    for _ in range(600):
        prompt = rng.randrange(50, 8000)
        model.observe("gpu", prompt, prompt, 4 * service_seconds(TRUE_COST, prompt, prompt))
    found = model.coefficients("gpu")
    assert service_seconds(found, 4000, 4000) == pytest.approx(4 * service_seconds(TRUE_COST, 4000, 4000), rel=0.1)


@given(
    st.lists(st.tuples(st.integers(1, 130_000), st.integers(1, 130_000), st.floats(0, 1e4)), min_size=1, max_size=60)
)
def test_no_history_makes_a_cost_negative_or_absurd(samples: list[tuple[int, int, float]]) -> None:
    model = CostModel()
    for uncached, prompt, seconds in samples:
        model.observe("gpu", min(uncached, prompt), prompt, seconds)
    found = model.coefficients("gpu")
    assert 0 <= found.base_seconds < 1e5
    assert 0 < found.per_token_seconds < 1e5
    assert 0 <= found.per_token_context_seconds < 1e5


def test_always_the_same_prompt_length_stays_stable() -> None:
    model = CostModel()
    for _ in range(5000):
        model.observe("gpu", 1000, 1000, 0.1)
    found = model.coefficients("gpu")
    assert service_seconds(found, 1000, 1000) == pytest.approx(0.1, rel=0.05)
    assert service_seconds(found, 100, 100) < 0.2


def test_the_number_of_classes_is_bounded() -> None:
    model = CostModel()
    for number in range(1000):
        model.observe(f"class-{number}", 1000, 1000, 9.0)
    assert model.coefficients("class-999") == DEFAULT_COST
    assert model.coefficients("class-0") != DEFAULT_COST
