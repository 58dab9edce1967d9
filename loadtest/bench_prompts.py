"""The chat requests of the router's bench: 6 KB, a few long system prompts that many share, and tails of their own."""

from __future__ import annotations

import random

import msgspec

from replica.tiny_tokenizer import vocabulary

__all__ = ["MODEL", "SYSTEM_PROMPTS", "TAIL_WORDS", "chat_body", "system_prompts"]

MODEL = "tiny"
SYSTEM_PROMPTS = 40
_SYSTEM_CHARACTERS = 5600
TAIL_WORDS = 40


def system_prompts() -> list[str]:
    """The same in every process."""
    chooser = random.Random(0)
    prompts = []
    for number in range(SYSTEM_PROMPTS):
        text = f"Assistant {number}:"
        while len(text) < _SYSTEM_CHARACTERS:
            text += " " + chooser.choice(_WORDS)
        prompts.append(text)
    return prompts


def chat_body(
    system_prompt: str, number: int, chooser: random.Random, *, stream: bool, tail_words: int = TAIL_WORDS
) -> bytes:
    """Request `number` of a run: no two have the same last message."""
    tail = " ".join(chooser.choices(_WORDS, k=tail_words))
    messages = [
        {"role": "system", "content": system_prompt},
        {"role": "user", "content": f"Question {number}: {tail}"},
    ]
    return msgspec.json.encode({"model": MODEL, "messages": messages, "max_tokens": 64, "stream": stream})


_SPACE = "\u0120"
"""How a byte-level vocabulary spells the space before a word."""
_WORDS = tuple(token[1:] for token in vocabulary() if token.startswith(_SPACE) and token[1:].isalpha())
