from __future__ import annotations

from replica.block_moves import Transferred
from replica.crossover import Crossover
from shared.fleet_records import CostCoefficients

# 10 microseconds a token, and as much again for each 10,000 tokens of context.
COST = CostCoefficients(0.005, 1e-5, 1e-9)


def onload(blocks: int, seconds: float) -> Transferred:
    return Transferred(onloaded_blocks=blocks, onload_seconds=seconds)


def test_what_is_not_measured_yet_is_brought_back() -> None:
    crossover = Crossover(16, lambda: None)
    crossover.observe(onload(1, 100.0))
    assert crossover.worth_onloading(16, 0)
    assert Crossover(16, lambda: COST).worth_onloading(16, 0)


def test_the_faster_way_is_taken_and_depth_makes_computing_slower() -> None:
    crossover = Crossover(16, lambda: COST)
    crossover.observe(onload(10, 160 * 1.5e-5))
    assert not crossover.worth_onloading(160, 0)
    assert not crossover.worth_onloading(160, 4_900)
    assert crossover.worth_onloading(160, 5_000)
    assert crossover.worth_onloading(10_200, 0)


def test_a_way_that_lost_is_tried_again_now_and_then_and_learned_about() -> None:
    crossover = Crossover(16, lambda: COST)
    crossover.observe(onload(1, 16 * 1e-4))
    decisions = [crossover.worth_onloading(16, 0) for _ in range(64)]
    assert [n for n, worth in enumerate(decisions, 1) if worth] == [32, 64]
    for _ in range(60):
        crossover.observe(onload(1, 16 * 1e-6))
    assert crossover.worth_onloading(16, 0)


def test_steps_without_transfers_teach_nothing() -> None:
    crossover = Crossover(16, lambda: COST)
    crossover.observe(Transferred(offloaded_blocks=3, offload_seconds=1.0))
    assert crossover.onload_seconds_per_token is None
