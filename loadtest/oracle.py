"""The ideal hit rate: what one endless cache, shared by every request of a run, would have given.

It counts tokens, since engines that reuse parts of blocks do, over the prompts that were really sent, answers included,
in the order they were sent. A prompt is held from the moment it is sent and an answer from when it ended, except for
its last token, which no engine has computed. No placement over any number of replicas can do better.
"""

from __future__ import annotations

from array import array
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


class _Node:
    """A stretch of tokens, and what went on from its end, by the first token of each."""

    __slots__ = ("children", "tokens")

    def __init__(self, tokens: array[int], children: dict[int, _Node]) -> None:
        self.tokens = tokens
        self.children = children


class _EndlessCache:
    """All beginnings of all that was computed: a radix tree, so that long prompts cost four bytes a token."""

    def __init__(self) -> None:
        self._root = _Node(array("I"), {})

    def held(self, tokens: Sequence[int]) -> int:
        """How many of the leading `tokens` were computed before."""
        return self._descend(array("I", tokens))[2]

    def add(self, tokens: Sequence[int]) -> None:
        packed = array("I", tokens)
        node, shared, depth = self._descend(packed)
        if shared < len(node.tokens):
            rest = _Node(node.tokens[shared:], node.children)
            node.tokens, node.children = node.tokens[:shared], {rest.tokens[0]: rest}
        if depth < len(packed):
            node.children[packed[depth]] = _Node(packed[depth:], {})

    def _descend(self, tokens: array[int]) -> tuple[_Node, int, int]:
        """The last node that `tokens` reach, how many of its own they share, and how many they share in all."""
        node, shared, depth = self._root, 0, 0
        while shared == len(node.tokens) and depth < len(tokens):
            child = node.children.get(tokens[depth])
            if child is None:
                break
            node, shared = child, _common(child.tokens, tokens[depth : depth + len(child.tokens)])
            depth += shared
        return node, shared, depth


def _common(left: array[int], right: array[int]) -> int:
    """The length of their longest common beginning, by bisection: arrays compare fast."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
