"""The `n` answers to one prompt, read as one: whichever grows, whoever writes to the client hears of it.

They are sequences of their own in the engine and share the prompt's blocks: the first computes them, the others wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Items

from replica.answer import Answer, Part, Usage

__all__ = ["Choices"]


class Choices:
    """`changed` is the event that all the answers set."""

    def __init__(self, answers: Items[Answer], changed: asyncio.Event) -> None:
        self._answers = answers
        self._changed = changed
        self._unfinished = len(answers)

    @property
    def finished(self) -> bool:
        """All has been taken, to the end of every answer."""
        return not self._unfinished

    @property
    def usage(self) -> Usage:
        """The prompt once, as the first answer found it, and the tokens of all answers."""
        first = self._answers[0].usage
        return Usage(
            prompt_tokens=first.prompt_tokens,
            completion_tokens=sum(answer.usage.completion_tokens for answer in self._answers),
            cached_tokens=first.cached_tokens,
            cache_write_tokens=first.cache_write_tokens,
        )

    async def next(self) -> list[Part]:
        """Wait for more and take all of it, of every answer that grew. Nothing comes before the first answer begins."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._answers[0].begun or self._answers[0].finish is not None:
                parts = [answer.take() for answer in self._answers if answer.fresh]
                self._unfinished -= sum(part.finish is not None for part in parts)
                return parts
