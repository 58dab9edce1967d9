"""A router's decision log, asked again: what would other policies have chosen, and by what would it have cost more?

Every decision was logged with all its candidates, priced. So a policy is asked with what the router knew then, and its
*regret* is what its choice costs above the cheapest candidate, by the log's own prices. Loads and caches are those that
the logged choices made: this judges choices one by one; what they lead to is for `warmroute simulate` without a log.
A policy that remembers (turns, sessions, what was sent) remembers its own choices.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from router.decision_log import DecisionLine, DroppedLine, FirstTokenLine, older
from router.placement import BLIND
from router.policies import build_policy
from router.policies.base import Candidate, Request
from router.policies.consistent_hash import ConsistentHash
from shared.blocks import unpack_keys

__all__ = ["AS_LOGGED", "DecisionLogEmptyError", "LoggedDecision", "Replayed", "Told", "read_decisions", "replay"]

AS_LOGGED = "as logged"
"""The router's own choices, beside those of policies."""

_LONGEST_LINE = 1 << 24
_decode = msgspec.json.Decoder(DecisionLine | FirstTokenLine | DroppedLine).decode


class DecisionLogEmptyError(Exception):
    """There is nothing to ask again. The message says why."""


@dataclass(frozen=True, slots=True)
class LoggedDecision:
    line: DecisionLine
    chosen: Candidate
    first_token: FirstTokenLine | None = None

    def request(self) -> Request:
        line = self.line
        return Request(
            prompt_tokens=line.prompt_tokens,
            keys=unpack_keys(line.keys),
            block_size=line.block_size,
            affinity=line.affinity,
            session=line.session,
            streamed=line.streamed,
        )


class Told(NamedTuple):
    """What a log tells, in the order of the decisions."""

    decisions: list[LoggedDecision]
    skipped: int
    """Lines that are none of this log's, or torn."""
    dropped: int
    """Lines that the router could not write."""


class Replayed(NamedTuple):
    """One policy's choices: `regrets[i]` seconds above the best candidate of decision i."""

    regrets: list[float]
    agreed: int


def read_decisions(path: Path) -> Told:
    """Of the file before it too, where there is one. Raises OSError, and DecisionLogEmptyError where no decision is."""
    decisions: list[LoggedDecision] = []
    places: dict[int, int] = {}
    skipped = dropped = 0
    for text in (*_lines(older(path), missing=True), *_lines(path)):
        try:
            line = _decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            skipped += 1
            continue
        if isinstance(line, DroppedLine):
            dropped += line.lines
        elif isinstance(line, FirstTokenLine):
            # Numbers begin anew with the router: the last decision of that number is meant.
            if (place := places.get(line.number)) is not None:
                decisions[place] = replace(decisions[place], first_token=line)
        elif (chosen := _chosen(line)) is None:
            skipped += 1
        else:
            places[line.number] = len(decisions)
            decisions.append(LoggedDecision(line, chosen))
    if not decisions:
        why = f"none of its {skipped} lines is one" if skipped else "it is empty"
        raise DecisionLogEmptyError(
            f"{path} holds no decisions ({why}): name a file that warmroute router --decision-log wrote"
        )
    return Told(decisions, skipped, dropped)


def replay(policy_name: str, decisions: Sequence[LoggedDecision], seed: int = 0) -> Replayed:
    """The choices of a fresh policy; `AS_LOGGED` stands for those of the log."""
    if policy_name == AS_LOGGED:
        return Replayed([_regret(decision, decision.chosen) for decision in decisions], len(decisions))
    policy, fallback = build_policy(policy_name, random.Random(seed)), ConsistentHash()
    regrets, agreed = [], 0
    for decision in decisions:
        line, request = decision.line, decision.request()
        asked = fallback if policy.reads_view and line.view == BLIND.step else policy
        candidate = asked.choose(request, line.candidates).candidate
        asked.placed(request, candidate.replica_id)
        regrets.append(_regret(decision, candidate))
        agreed += candidate.replica_id == line.chosen
    return Replayed(regrets, agreed)


def _regret(decision: LoggedDecision, choice: Candidate) -> float:
    return choice.cost_seconds - min(candidate.cost_seconds for candidate in decision.line.candidates)


def _chosen(line: DecisionLine) -> Candidate | None:
    """None for a line that contradicts itself."""
    if len(line.keys) % 8 or line.block_size < 1:
        return None
    return next((candidate for candidate in line.candidates if candidate.replica_id == line.chosen), None)


def _lines(path: Path, *, missing: bool = False) -> Iterator[bytes]:
    if missing and not path.exists():
        return
    with path.open("rb") as file:
        while text := file.readline(_LONGEST_LINE):
            if not text.isspace():
                yield text
