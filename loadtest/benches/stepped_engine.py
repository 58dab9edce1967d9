"""A replica's engine without its thread: scheduler, prefix cache and runner, stepped until all is answered."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from replica.block_moves import carry_out
from replica.prefix_cache import PrefixCache
from replica.runner import Runner
from replica.scheduler import Scheduler
from replica.sequence import FinishReason, SamplingParams, Sequence
from shared.blocks import BlockKey, namespace_root

__all__ = ["Served", "SteppedEngine"]

_MAX_SEQUENCES = 64
_ROOT = namespace_root("bench")


class Served(NamedTuple):
    answers: list[list[int]]
    computed_tokens: int
    step_seconds: float
    """Of all steps, as the runner tells it: measured, or from the cost model of a simulated one."""


class SteppedEngine:
    """Answers greedily, and to the full length."""

    def __init__(self, runner: Runner, token_budget: int = 512) -> None:
        self.cache = PrefixCache(runner.num_blocks, runner.block_size, host_blocks=runner.host_blocks)
        self._runner = runner
        self._scheduler = Scheduler(self.cache, token_budget, _MAX_SEQUENCES, _MAX_SEQUENCES)
        self._requests = 0

    def serve(self, prompts: Items[list[int]], max_tokens: int, root: BlockKey = _ROOT) -> Served:
        """All at once."""
        sequences = []
        for prompt in prompts:
            self._requests += 1
            params = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
            sequences.append(Sequence(f"b{self._requests}", list(prompt), len(prompt), params, root))
            self._scheduler.add(sequences[-1])
        computed_before = self._scheduler.counters.computed_tokens
        seconds = 0.0
        while self._scheduler.has_work:
            chunks = self._scheduler.schedule()
            seconds += carry_out(self._runner, self.cache.take_moves()).onload_seconds
            result = self._runner.execute(chunks)
            self._scheduler.commit(chunks, result)
            seconds += result.seconds
        assert all(sequence.finish_reason is FinishReason.LENGTH for sequence in sequences)
        answers = [sequence.tokens[sequence.prompt_tokens :] for sequence in sequences]
        return Served(answers, self._scheduler.counters.computed_tokens - computed_before, seconds)
