"""A public trace as live traffic: each block id becomes a text of its own, so equal ids are equal tokens in any engine.

Told `shrink` times shorter (blocks, prompts and answers alike), who shares how much with whom stays as it was, and a
small machine can serve it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random

from loadtest.simulator.traces import Conversation, Prompt, TraceError, read_trace
from loadtest.workloads import WORDS, Session, Turn

__all__ = ["TracePlan"]


@dataclass(frozen=True, slots=True)
class TracePlan:
    """One run of a trace's first requests, with all times between them stretched by `scale`."""

    path: str
    seed: int
    requests: int
    scale: float = 1.0
    shrink: int = 1
    most_prompt_tokens: int = 1 << 17

    @property
    def workload(self) -> str:
        return Path(self.path).name

    @property
    def rate(self) -> float:
        """Requests per second on average, if answers took no time. Raises TraceError."""
        times = [at for each in self._conversations() for at in _times(each)]
        return len(times) / max(1e-6, (max(times) - min(times)) * self.scale)

    def with_rate(self, rate: float) -> TracePlan:
        return replace(self, scale=self.scale * self.rate / rate)

    def fitting(self, context_tokens: int) -> TracePlan:
        """Conversations end before a prompt that, with the longest answer, might not fit."""
        return replace(self, most_prompt_tokens=context_tokens * 15 // 16)

    def with_seed(self, seed: int) -> TracePlan:
        """It moves arrivals as far as the trace's clock leaves open, and no more."""
        return replace(self, seed=seed)

    def schedule(self) -> list[Session]:
        """A turn waits for the answer before it, and then as long as it did in the trace. Raises TraceError."""
        conversations = self._conversations()
        begin = conversations[0].start_seconds
        return [
            Session(number, (), tuple(self._turns(each, (each.start_seconds - begin) * self.scale)), standalone=True)
            for number, each in enumerate(conversations)
        ]

    def _conversations(self) -> list[Conversation]:
        """As much of them as the first `requests` requests are."""
        return _first_conversations(self.path, self.seed, self.most_prompt_tokens * self.shrink, self.requests)

    def _turns(self, conversation: Conversation, start_seconds: float) -> Iterator[Turn]:
        for number, turn in enumerate(conversation.turns):
            assert isinstance(turn.prompt, Prompt), "a trace's prompts are told by runs"
            yield Turn(
                start_seconds,
                self._text(turn.prompt),
                max(1, turn.output_tokens // self.shrink),
                think_seconds=turn.think_seconds * self.scale if number else None,
            )

    def _text(self, prompt: Prompt) -> str:
        """For the model `tiny`, a token each word with its space."""
        blocks = (
            _block_text(run.first + number, max(1, run.each // self.shrink))
            for run in prompt.runs
            for number in range(run.blocks)
        )
        words = [word for block in blocks for word in block]
        return "".join(f" {word}" for word in words[: max(1, prompt.tokens // self.shrink)])


@lru_cache(maxsize=4)
def _first_conversations(path: str, seed: int, most_prompt_tokens: int, requests: int) -> list[Conversation]:
    every = read_trace(Path(path), seed, most_prompt_tokens)
    asked = sorted((at, number) for number, each in enumerate(every) for at in _times(each))[:requests]
    if not asked:
        raise TraceError(f"{path} has no request of at most {most_prompt_tokens:,} tokens; replicas need more room")
    taken = Counter(number for _, number in asked)  # in the order of their first request
    return [replace(every[number], turns=every[number].turns[:turns]) for number, turns in taken.items()]


def _times(conversation: Conversation) -> Iterator[float]:
    """Of its turns, if answers took no time."""
    at = conversation.start_seconds
    for number, turn in enumerate(conversation.turns):
        at += turn.think_seconds if number else 0.0
        yield at


@lru_cache(maxsize=1 << 14)
def _block_text(block: int, words: int) -> tuple[str, ...]:
    return tuple(Random(f"block/{block}").choices(WORDS, k=words))
