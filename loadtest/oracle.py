"""The ideal hit rate: what one endless cache, shared by every request of a run, would have given.

It counts full blocks, as replicas do, over the prompts that were really sent, answers included, in the order they
were sent. A prompt is held from the moment it is sent and an answer from when it ended, except for its last token,
which no engine has computed. No placement over any number of replicas can do better.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from loadtest.records import RequestRecord
from loadtest.workloads import Message, Session
from shared.blocks import BlockKey, block_keys, namespace_root

__all__ = ["EncodeAnswer", "EncodePrompt", "IdealHit", "ideal_hits"]

EncodePrompt = Callable[[list[Message]], Sequence[int]]
"""Messages -> the token ids that the engine sees, up to where the answer begins."""
EncodeAnswer = Callable[[str], Sequence[int]]
"""An answer's text -> its token ids."""

_ROOT = namespace_root("ideal")


class IdealHit(NamedTuple):
    prompt_tokens: int
    cached_tokens: int


def ideal_hits(
    sessions: Sequence[Session],
    records: Sequence[RequestRecord],
    encode_prompt: EncodePrompt,
    encode_answer: EncodeAnswer,
    block_size: int,
) -> list[IdealHit | None]:
    """One for each of `records` (in the order sent); None for a turn that was never asked."""
    by_id = {session.id: session for session in sessions}
    answers: defaultdict[int, list[str]] = defaultdict(list)
    held: set[BlockKey] = set()
    hits: list[IdealHit | None] = []
    for record in records:
        said = answers[record.session]
        if record.turn != len(said):
            hits.append(None)
            continue
        prompt = list(encode_prompt(by_id[record.session].messages(said)))
        keys = block_keys(_ROOT, prompt, block_size)
        usable = keys[: (len(prompt) - 1) // block_size]  # the last token of a prompt is always computed
        found = next((n for n, key in enumerate(usable) if key not in held), len(usable))
        hits.append(IdealHit(len(prompt), found * block_size))
        held.update(keys)
        if record.error is None:
            said.append(record.answer)
            answer = list(encode_answer(record.answer))[: max(0, record.completion_tokens - 1)]
            held.update(block_keys(_ROOT, prompt + answer, block_size))
    return hits
