"""Peers' policies, from what they publish about themselves, for the simulator. One file each."""

from __future__ import annotations

import random
from collections.abc import Callable

from loadtest.simulator.baselines.aibrix import AIBrix
from loadtest.simulator.baselines.dynamo import Dynamo
from loadtest.simulator.baselines.llm_d import LlmdBlend, LlmdSticky
from loadtest.simulator.baselines.lmetric import LMetric
from loadtest.simulator.baselines.preble import Preble
from loadtest.simulator.baselines.simple import LeastTokens, ShortestTTFT
from router.policies import POLICIES
from router.policies.base import Policy

__all__ = ["SIMULATED_POLICIES"]

SIMULATED_POLICIES: dict[str, Callable[[random.Random], Policy]] = {
    **POLICIES,
    Dynamo.name: lambda rng: Dynamo(),
    LlmdBlend.name: lambda rng: LlmdBlend(),
    LlmdSticky.name: LlmdSticky,
    Preble.name: lambda rng: Preble(),
    LMetric.name: lambda rng: LMetric(),
    AIBrix.name: lambda rng: AIBrix(),
    LeastTokens.name: lambda rng: LeastTokens(),
    ShortestTTFT.name: lambda rng: ShortestTTFT(),
}
"""The router's own and its peers'; the peer `sglang-router` is the router's own `prefix-tree`."""
