"""What steps cost on real hardware, from published figures, as the simulated runner counts it.

    prefill    2 FLOPs per parameter and token at about half of the dense 16-bit peak (the share that well-tuned serving
               reaches on long prompts); attention 4 x layers x hidden FLOPs per token and token attended to
    a step     the weights are read once: bytes / memory bandwidth, plus launch and communication
    a decode   reads the KV of its context: bytes per token x 8,000 tokens / memory bandwidth
    capacity   90 % of memory less the weights, over KV bytes per token (2 x layers x KV heads x head size x 2 bytes)

Sources: NVIDIA's data sheets for A10 (125 TFLOPS, 600 GB/s, 24 GB), L40S (362 TFLOPS, 864 GB/s, 48 GB) and H100 SXM
(989 TFLOPS, 3.35 TB/s, 80 GB), dense 16-bit; the Llama 3 paper (2024) for 8B (32 layers, hidden 4,096, 8 KV heads of
128) and 70B (80 layers, hidden 8,192, 8 KV heads of 128). Checked against NVIDIA NIM's published inter-token latency at
concurrency 1: 4.6 ms (8B), 13.2 ms (70B). `default` is what `warmroute replica --engine sim` plays.
"""

from __future__ import annotations

from dataclasses import dataclass

from replica.simulated_runner import SimulatedCost
from shared.fleet_state import CostCoefficients

__all__ = ["PROFILES", "Profile"]


@dataclass(frozen=True, slots=True)
class Profile:
    cost: SimulatedCost
    kv_tokens: int
    """The pool of one replica."""
    token_budget: int = 512

    @property
    def of_step(self) -> CostCoefficients:
        """As the engine measures it (see `replica.step_meter`)."""
        cost = self.cost
        return CostCoefficients(cost.base_seconds, cost.per_token_seconds, cost.per_token_context_seconds)

    @property
    def published(self) -> CostCoefficients:
        """What routers are told."""
        return self.of_step.of_prefill(self.token_budget)

    def alone_seconds(self, uncached_tokens: int, prompt_tokens: int) -> float:
        """A prefill with the replica to itself."""
        steps = -(-uncached_tokens // self.token_budget)
        context = uncached_tokens * (prompt_tokens - uncached_tokens / 2)
        cost = self.cost
        return (
            steps * cost.base_seconds
            + uncached_tokens * cost.per_token_seconds
            + context * cost.per_token_context_seconds
        )


PROFILES = {
    "default": Profile(SimulatedCost(), kv_tokens=400_000),
    "a10-llama-8b": Profile(SimulatedCost(0.028, 2.6e-4, 8.4e-9, 1.7e-3), kv_tokens=42_000),
    "l40s-llama-8b": Profile(SimulatedCost(0.020, 8.9e-5, 2.9e-9, 1.2e-3), kv_tokens=207_000),
    "h100-llama-8b": Profile(SimulatedCost(0.0055, 3.2e-5, 1.1e-9, 3.1e-4), kv_tokens=427_000, token_budget=2048),
    "4xh100-llama-70b": Profile(SimulatedCost(0.0135, 7.9e-5, 1.5e-9, 2.0e-4), kv_tokens=451_000, token_budget=2048),
}
