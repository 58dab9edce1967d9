"""Workloads without a trace: the shapes that routers are compared by, each from a seed.

shared-prefix  150 system prompts of 6,000 tokens, 1,200 of one's own behind; the rate climbs from a twentieth to all
chat           conversations of some 8 turns with a common system prompt, half a minute between turns
rag            questions of 200 tokens behind one of 400 documents of 8,000, Zipf-distributed
agents         20 to 60 turns, each adds a tool's result of 1,200 tokens seconds after the answer before
bursts         cold prompts of 4,000 tokens by the dozen at one instant, each dozen with one prefix of 3,000
hot-prefix     every prompt begins with the same 2,500 of its 9,800 tokens
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count

from loadtest.simulator.traces import ANSWER_TOKEN, Conversation, Prompt, Run, Turn

__all__ = ["WORKLOADS", "generate"]

Arrivals = Iterator[float]


class _Source:
    """Randomness, and tokens that nobody else has."""

    def __init__(self, seed: int, rate: float) -> None:
        self.rng = random.Random(seed)
        self._rate = rate
        self._fresh = count(ANSWER_TOKEN + 1)

    def text(self, tokens: float) -> Run:
        return Run(next(self._fresh), 1, max(1, round(tokens)))

    def about(self, mean: float) -> float:
        """Log-normal, of that mean."""
        return mean * self.rng.lognormvariate(-0.125, 0.5)

    def arrivals(self) -> Arrivals:
        now = 0.0
        while True:
            now += self.rng.expovariate(self._rate)
            yield now


def generate(workload: str, requests: int, rate: float, seed: int = 0) -> list[Conversation]:
    """About that many requests, at that many a second on average (while it climbs: at most)."""
    return WORKLOADS[workload](_Source(seed, rate), requests, rate)


def _shared_prefix(source: _Source, requests: int, rate: float) -> list[Conversation]:
    systems = [source.text(6000) for _ in range(150)]
    found, now = [], 0.0
    for number in range(requests):
        now += source.rng.expovariate(rate * (0.05 + 0.95 * number / requests))
        prompt = Prompt.of(source.rng.choice(systems), source.text(1200))
        found.append(Conversation(now, (Turn(prompt, 100),)))
    return found


def _chat(source: _Source, requests: int, rate: float) -> list[Conversation]:
    return _conversations(source, requests, rate, (4, 12), opening=600, said=300, answered=250, think=30)


def _agents(source: _Source, requests: int, rate: float) -> list[Conversation]:
    return _conversations(source, requests, rate, (20, 60), opening=6000, said=1200, answered=150, think=4)


def _conversations(
    source: _Source,
    requests: int,
    rate: float,
    turns: tuple[int, int],
    *,
    opening: float,
    said: float,
    answered: float,
    think: float,
) -> list[Conversation]:
    system = source.text(1500)
    found: list[Conversation] = []
    now = 0.0
    while requests > 0:
        length = min(requests, source.rng.randint(*turns))
        requests -= length
        now += source.rng.expovariate(rate / length)
        prompt = Prompt.of(system, source.text(source.about(opening)))
        asked = []
        for turn in range(length):
            answer = max(2, round(source.about(answered)))
            asked.append(Turn(prompt, answer, source.rng.expovariate(1 / think) if turn else 0.0))
            # An answer's last token is never computed, and so never cached with it.
            prompt = prompt.then(Run(ANSWER_TOKEN, 1, answer), source.text(source.about(said)))
        found.append(Conversation(now, tuple(asked)))
    return found


def _rag(source: _Source, requests: int, rate: float) -> list[Conversation]:
    documents = [source.text(8000) for _ in range(400)]
    likely = [1 / place for place in range(1, len(documents) + 1)]
    return [
        Conversation(at, (Turn(Prompt.of(document, source.text(source.about(200))), 150),))
        for at, document in zip(source.arrivals(), source.rng.choices(documents, likely, k=requests), strict=False)
    ]


def _bursts(source: _Source, requests: int, rate: float) -> list[Conversation]:
    found: list[Conversation] = []
    now = 0.0
    while len(found) < requests:
        now += source.rng.expovariate(rate / 12)
        prefix = source.text(3000)
        found += [Conversation(now, (Turn(Prompt.of(prefix, source.text(1000)), 100),)) for _ in range(12)]
    return found[:requests]


def _hot_prefix(source: _Source, requests: int, rate: float) -> list[Conversation]:
    hot = source.text(2500)
    return [
        Conversation(at, (Turn(Prompt.of(hot, source.text(7300)), 100),))
        for at, _ in zip(source.arrivals(), range(requests), strict=False)
    ]


WORKLOADS: dict[str, Callable[[_Source, int, float], list[Conversation]]] = {
    "shared-prefix": _shared_prefix,
    "chat": _chat,
    "rag": _rag,
    "agents": _agents,
    "bursts": _bursts,
    "hot-prefix": _hot_prefix,
}
