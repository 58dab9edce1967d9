"""Seeded traffic: who says what, and when. The same seed gives the same sessions, whatever serves them.

A session opens with messages that many sessions share (a system prompt, worked examples) and then takes turns; turn
k + 1 contains the answer to turn k. Arrivals are scheduled beforehand (`schedule`), so a slow server meets the same
arrivals as a fast one.

    chat            conversations that grow turn by turn, `open_sessions` of them at any time
    shared-prefix   few long system prompts, one short question each
    few-shot        few tasks with worked examples, one short input each
    rag             a question behind three documents; popular documents are asked about more often

Content and timing come from separate random streams: another rate changes when things are said, not what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, repeat
from random import Random
from typing import Literal

__all__ = ["SHAPES", "WORDS", "Arrivals", "Message", "Plan", "Session", "Shape", "Turn", "Workload"]

Message = dict[str, str]
Arrivals = Literal["poisson", "fixed"]

_DOCUMENTS_PER_QUESTION = 3
_EXAMPLES_PER_TASK = 6

_VOCABULARY = """
the of and to in a that for was with be by on not his but at are this have from or had they which one you were
all there would their we him been has when who will no more out so up said what about than into them can only
other time new some could these two may first then do any like my now over such our man me even most made after
also did many off before must well back through years where much your way down should because long each just
state those people too how little good world make very year still see own work men day get here old life both
between being under three never know same last another while us might great go come since against right came
take used himself few house use place during high without again home around small however found part school once
general upon say every
"""
WORDS = _VOCABULARY.split()
"""Each of them a token of the model `tiny`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How big a workload is. Lengths are means in words; a real length lies within half of its mean."""

    groups: int
    """Distinct openings; of documents, for `rag`. The n-th is asked for 1/n as often as the first."""
    opening_words: int
    """Length of one opening; of one document, for `rag`."""
    turns: int
    turn_words: int
    max_tokens: int
    open_sessions: int = 1
    """Conversations that take turns side by side. With one turn each it changes nothing."""


SHAPES = {
    "chat": Shape(groups=200, opening_words=300, turns=8, turn_words=30, max_tokens=16, open_sessions=14),
    "shared-prefix": Shape(groups=8, opening_words=800, turns=1, turn_words=40, max_tokens=16),
    "few-shot": Shape(groups=6, opening_words=600, turns=1, turn_words=30, max_tokens=8),
    "rag": Shape(groups=24, opening_words=300, turns=1, turn_words=24, max_tokens=24),
}
"""Every workload by name, with sizes that suit the model `tiny` on one core."""


@dataclass(frozen=True, slots=True)
class Turn:
    at_seconds: float
    """Scheduled arrival, from the start of the run. It goes later only if the answer before it is not yet there."""
    text: str
    max_tokens: int
    think_seconds: float | None = None
    """If told, it is asked so long after the answer before it, whenever that is."""


@dataclass(frozen=True, slots=True)
class Session:
    id: int
    opening: tuple[Message, ...]
    turns: tuple[Turn, ...]
    standalone: bool = False
    """Each turn's text is the whole prompt, with whatever it repeats of the turns before."""

    def messages(self, answers: Sequence[str]) -> list[Message]:
        """The request of turn `len(answers)`, which carries the conversation so far."""
        if self.standalone:
            return [{"role": "user", "content": self.turns[len(answers)].text}]
        spoken = list(self.opening)
        for turn, answer in zip(self.turns, answers, strict=False):
            spoken.append({"role": "user", "content": turn.text})
            spoken.append({"role": "assistant", "content": answer})
        spoken.append({"role": "user", "content": self.turns[len(answers)].text})
        return spoken


@dataclass(frozen=True, slots=True)
class Workload:
    """What is said: an endless row of sessions, each a function of the seed and its number alone."""

    name: str
    shape: Shape
    seed: int

    def session(self, number: int, arrivals: Sequence[float] = ()) -> Session:
        """Session `number` with one turn per arrival, or with all of its turns at once where none are given."""
        arrivals = arrivals or [0.0] * self.shape.turns
        turns = [Turn(at, self._turn_text(number, k), self.shape.max_tokens) for k, at in enumerate(arrivals)]
        return Session(number, self._opening(number), tuple(turns))

    def _opening(self, number: int) -> tuple[Message, ...]:
        if self.name == "rag":
            return ({"role": "system", "content": "Answer from the documents alone."},)
        group = _popular(Random(f"{self.seed}/session/{number}"), self.shape.groups)
        if self.name == "few-shot":
            return _worked_examples(self.seed, group, self.shape.opening_words)
        return ({"role": "system", "content": _text(f"{self.seed}/group/{group}", self.shape.opening_words)},)

    def _turn_text(self, number: int, turn: int) -> str:
        question = _text(f"{self.seed}/session/{number}/turn/{turn}", self.shape.turn_words)
        if self.name != "rag" or turn:
            return question
        draw = Random(f"{self.seed}/session/{number}")
        chosen: dict[int, None] = {}
        while len(chosen) < min(_DOCUMENTS_PER_QUESTION, self.shape.groups):
            chosen[_popular(draw, self.shape.groups)] = None
        documents = [_text(f"{self.seed}/document/{d}", self.shape.opening_words) for d in chosen]
        return "\n\n".join([*documents, question])


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of an open loop: a workload and its arrivals, `rate` requests per second in all."""

    workload: str
    shape: Shape
    seed: int
    rate: float
    requests: int
    arrivals: Arrivals = "poisson"

    def with_seed(self, seed: int) -> Plan:
        return replace(self, seed=seed)

    def with_rate(self, rate: float) -> Plan:
        return replace(self, rate=rate)

    def schedule(self) -> list[Session]:
        """All sessions of the run. Each arrival is the next turn of one of the open conversations.

        A conversation that was quiet for longer is more likely to be next: it is drawn from the half that has waited
        longest, so nobody answers before he has read. When its turns are over a new one takes its place; the first
        ones begin with fewer turns to go, so that they do not all end together.
        """
        shape, workload = self.shape, Workload(self.workload, self.shape, self.seed)
        draw = Random(f"{self.seed}/who")
        sessions: list[list[float]] = [[] for _ in range(shape.open_sessions)]
        left = [draw.randint(1, shape.turns) for _ in sessions]
        quiet = deque(range(shape.open_sessions))
        for at in self._arrival_times():
            place = draw.randrange((len(quiet) + 1) // 2)
            number = quiet[place]
            del quiet[place]
            sessions[number].append(at)
            if len(sessions[number]) == left[number]:
                number = len(sessions)
                sessions.append([])
                left.append(shape.turns)
                quiet.insert(draw.randint(0, len(quiet)), number)
            else:
                quiet.append(number)
        return [workload.session(number, arrivals) for number, arrivals in enumerate(sessions) if arrivals]

    def _arrival_times(self) -> list[float]:
        draw = Random(f"{self.seed}/when")
        gap: Callable[[], float]
        gap = (lambda: draw.expovariate(self.rate)) if self.arrivals == "poisson" else (lambda: 1 / self.rate)
        return list(accumulate((gap() for _ in range(self.requests - 1)), initial=0.0))


def _popular(draw: Random, count: int) -> int:
    """Zipf's law: number n is drawn 1/(n + 1) as often as number 0."""
    return draw.choices(range(count), cum_weights=_zipf_weights(count))[0]


@lru_cache(maxsize=64)
def _zipf_weights(count: int) -> tuple[float, ...]:
    return tuple(accumulate(1 / (n + 1) for n in range(count)))


def _worked_examples(seed: int, task: int, words: int) -> tuple[Message, ...]:
    each = max(2, words // (2 * _EXAMPLES_PER_TASK))
    messages: list[Message] = [{"role": "system", "content": _text(f"{seed}/task/{task}", each)}]
    for role, n in zip(("user", "assistant") * _EXAMPLES_PER_TASK, range(2 * _EXAMPLES_PER_TASK), strict=True):
        messages.append({"role": role, "content": _text(f"{seed}/task/{task}/{n}", each)})
    return tuple(messages)


@lru_cache(maxsize=4096)
def _text(name: str, mean_words: int) -> str:
    """Words that are a function of `name` alone, between half and one and a half times the mean in number."""
    draw = Random(name)
    count = draw.randint(max(1, mean_words // 2), max(1, mean_words * 3 // 2))
    return " ".join(word(WORDS) for word in repeat(draw.choice, count))
