"""The ideal hit rate: what one endless cache, shared by every request of a run, would have given.

It counts tokens, since engines that reuse parts of blocks do, over the prompts that were really sent, answers included,
in the order they were sent. A prompt is held from the moment it is sent and an answer from when it ended, except for
its last token, which no engine has computed. No placement over any number of replicas can do better.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from loadtest.records import RequestRecord
from loadtest.workloads import Message, Session

__all__ = ["EncodeAnswer", "EncodePrompt", "IdealHit", "ideal_hits"]

EncodePrompt = Callable[[list[Message]], Sequence[int]]
"""Messages -> the token ids that the engine sees, up to where the answer begins."""
EncodeAnswer = Callable[[str], Sequence[int]]
"""An answer's text -> its token ids."""


class IdealHit(NamedTuple):
    prompt_tokens: int
    cached_tokens: int


def ideal_hits(
    sessions: Sequence[Session],
    records: Sequence[RequestRecord],
    encode_prompt: EncodePrompt,
    encode_answer: EncodeAnswer,
) -> list[IdealHit | None]:
    """One for each of `records` (in the order sent); None for a turn that was never asked."""
    by_id = {session.id: session for session in sessions}
    answers: defaultdict[int, list[str]] = defaultdict(list)
    cache = _EndlessCache()
    hits: list[IdealHit | None] = []
    for record in records:
        said = answers[record.session]
        if record.turn != len(said):
            hits.append(None)
            continue
        prompt = list(encode_prompt(by_id[record.session].messages(said)))
        # The last token of a prompt is always computed.
        hits.append(IdealHit(len(prompt), min(cache.held(prompt), len(prompt) - 1)))
        cache.add(prompt)
        if record.error is None:
            said.append(record.answer)
            answer = list(encode_answer(record.answer))[: max(0, record.completion_tokens - 1)]
            cache.add(prompt + answer)
    return hits


class _EndlessCache:
    """All beginnings of all that was computed: a tree with a node per token."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}

    def held(self, tokens: Sequence[int]) -> int:
        """How many of the leading `tokens` were computed before."""
        node = 0
        for depth, token in enumerate(tokens):
            child = self._next.get((node, token))
            if child is None:
                return depth
            node = child
        return len(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        node = 0
        for token in tokens:
            node = self._next.setdefault((node, token), len(self._next) + 1)
