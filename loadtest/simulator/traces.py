"""What is asked of the fleet: conversations of turns, each a prompt, and the readers of public traces.

A prompt is told by runs, so that millions of tokens cost nothing until they are needed:

    Run(first=7, blocks=3, each=512)      512 tokens 7, 512 tokens 8, 512 tokens 9

Token 0 is what the simulated engine answers with: a run of it is an answer that became part of the next prompt.
"""

from __future__ import annotations

import gzip
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loadtest.simulator.profiles import Profile

__all__ = [
    "ANSWER_TOKEN",
    "Conversation",
    "Prompt",
    "Run",
    "ListedPrompt",
    "TraceError",
    "Turn",
    "offered_load",
    "read_trace",
    "stretched",
]

ANSWER_TOKEN = 0
_MOONCAKE_BLOCK = 512
_MOONCAKE_RESOLUTION_SECONDS = 3.0
_AGENTIC_SPAN_SECONDS = 3600.0
_MOST_IDS = 1 << 22
"""Room for the block ids of one conversation, where they are local to it."""


class TraceError(Exception):
    """The file is no trace that is known here. The message says what was expected."""


class Run(NamedTuple):
    """Tokens `first`, `first + 1`, ... (`blocks` of them), each `each` times."""

    first: int
    blocks: int
    each: int


class Prompt(NamedTuple):
    """The first `tokens` tokens of all `runs`."""

    runs: tuple[Run, ...]
    tokens: int

    @classmethod
    def of(cls, *runs: Run) -> Prompt:
        return cls(runs, sum(run.blocks * run.each for run in runs))

    def then(self, *runs: Run) -> Prompt:
        """This prompt, continued."""
        return Prompt.of(*self.runs, *runs)

    def token_ids(self) -> array[int]:
        packed = b"".join(
            (first + number).to_bytes(4, "little") * each
            for first, blocks, each in self.runs
            for number in range(blocks)
        )
        ids = array("I", packed[: 4 * self.tokens])
        assert len(ids) == self.tokens, "a prompt is longer than its runs"
        return ids


class ListedPrompt(NamedTuple):
    """The same, told token by token."""

    ids: array[int]

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def token_ids(self) -> array[int]:
        return self.ids[:]


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: Prompt | ListedPrompt
    output_tokens: int
    think_seconds: float = 0.0
    """From the end of the answer before (or the conversation's start) until this is asked."""
    due_seconds: float | None = None
    """If told, it is due then instead, and asked as soon after as the answer before it is there."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns asked one after the other: a turn waits for the answer before it (closed), a conversation for nobody."""

    start_seconds: float
    turns: tuple[Turn, ...]


def read_trace(
    path: Path, seed: int = 0, most_prompt_tokens: int = 1 << 20, most_think_seconds: float = 60.0
) -> list[Conversation]:
    """Mooncake's format, or the agentic one, whose conversations begin at any time within an hour.

    A conversation ends before its first prompt above `most_prompt_tokens`, and nobody thinks longer than
    `most_think_seconds`. Raises TraceError for anything else.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            lines = [msgspec.json.decode(line) for line in file if line.strip()]
    except (OSError, msgspec.DecodeError) as error:
        raise TraceError(f"{path} cannot be read as JSON lines: {error}") from None
    first = lines[0] if lines and isinstance(lines[0], dict) else {}
    try:
        if "hash_ids" in first:
            return list(_mooncake(lines, random.Random(seed), most_prompt_tokens))
        if "requests" in first:
            return list(_agentic(lines, random.Random(seed), most_prompt_tokens, most_think_seconds))
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path} has a line that is not as its first: {error!r}") from None
    raise TraceError(f"{path} is no trace known here: lines with hash_ids (Mooncake) or requests (agentic) are")


def stretched(conversations: Sequence[Conversation], scale: float) -> list[Conversation]:
    """Starts `scale` times as far apart; what happens within a conversation keeps its pace."""
    return [replace(each, start_seconds=each.start_seconds * scale) for each in conversations]


def offered_load(conversations: Sequence[Conversation], profile: Profile, replicas: int) -> float:
    """Share of the fleet's time that all prefills would take without any cache, from the first arrival to the last."""
    prompts = [turn.prompt.tokens for each in conversations for turn in each.turns]
    starts = [each.start_seconds for each in conversations]
    work = sum(profile.alone_seconds(tokens, tokens) for tokens in prompts)
    return work / (replicas * max(1e-9, max(starts) - min(starts)))


def _mooncake(lines: list[dict[str, Any]], rng: random.Random, most_tokens: int) -> Iterator[Conversation]:
    # The trace's clock ticks every three seconds: within a tick, arrivals are spread evenly.
    for line in lines:
        if line["input_length"] <= most_tokens:
            runs = tuple(Run(1 + block, 1, _MOONCAKE_BLOCK) for block in line["hash_ids"])
            turn = Turn(Prompt(runs, line["input_length"]), max(1, line["output_length"]))
            yield Conversation(line["timestamp"] / 1000 + rng.random() * _MOONCAKE_RESOLUTION_SECONDS, (turn,))


def _agentic(
    lines: list[dict[str, Any]], rng: random.Random, most_tokens: int, most_think_seconds: float
) -> Iterator[Conversation]:
    for number, line in enumerate(lines):
        turns: list[Turn] = []
        for asked in _flat(line["requests"]):
            if asked["in"] > most_tokens:
                break
            base = number * _MOST_IDS
            runs = tuple(Run(base + first, count, line["block_size"]) for first, count in asked["h"])
            # Blocks are counted down: what is beyond the last full one belongs to this request alone.
            missing = asked["in"] - sum(run.blocks * run.each for run in runs)
            if missing > 0:
                runs += (Run(base + _MOST_IDS - 1 - len(turns), 1, missing),)
            turns.append(
                Turn(
                    Prompt(runs, asked["in"]),
                    max(1, asked["out"]),
                    min(asked.get("think_time", 0.0), most_think_seconds),
                )
            )
        if turns:
            yield Conversation(rng.random() * _AGENTIC_SPAN_SECONDS, tuple(turns))


def _flat(requests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Sub-agents' requests where their agent called them, which waits for them."""
    for request in requests:
        if "requests" in request:
            yield from _flat(request["requests"])
        else:
            yield request
