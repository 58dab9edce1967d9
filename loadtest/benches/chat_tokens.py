"""Conversations as token ids, for benches that need neither text nor a model.

    every prompt   [ system prompt, the same for all | user | answer | user | answer | user ]     grows turn by turn

The conversations under way take their turns in random order; one that ended makes room for the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

__all__ = ["ChatShape", "Turn", "chat", "shared_prefixes"]

_VOCABULARY = 32_000


class Turn(NamedTuple):
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Lengths in tokens; those of users and answers are means, a real one lies within half of it."""

    conversations: int = 400
    open_conversations: int = 40
    turns: int = 3
    system_tokens: int = 300
    user_tokens: int = 120
    answer_tokens: int = 80


def chat(shape: ChatShape, seed: int) -> Iterator[Turn]:
    rng = Random(seed)
    system = _text(rng, shape.system_tokens)
    waiting = [list(system) for _ in range(shape.conversations)]
    under_way = [(waiting.pop(), 0) for _ in range(min(shape.open_conversations, len(waiting)))]
    while under_way:
        history, turns = under_way.pop(rng.randrange(len(under_way)))
        prompt = history + _text(rng, _near(rng, shape.user_tokens))
        answer = _text(rng, _near(rng, shape.answer_tokens))
        yield Turn(prompt, answer)
        if turns + 1 < shape.turns:
            under_way.append((prompt + answer, turns + 1))
        elif waiting:
            under_way.append((waiting.pop(), 0))


def shared_prefixes(prefix_tokens: int, own_tokens: int, groups: int, requests: int, seed: int) -> Iterator[Turn]:
    """One question each, behind one of few prefixes that many share."""
    rng = Random(seed)
    prefixes = [_text(rng, prefix_tokens) for _ in range(groups)]
    for _ in range(requests):
        yield Turn(rng.choice(prefixes) + _text(rng, _near(rng, own_tokens)), _text(rng, 16))


def _near(rng: Random, mean: int) -> int:
    return rng.randint(mean - mean // 2, mean + mean // 2)


def _text(rng: Random, tokens: int) -> list[int]:
    return [rng.randrange(_VOCABULARY) for _ in range(tokens)]
