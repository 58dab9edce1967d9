"""What a generation request asks for, whichever dialect it came in.

`RoutingFields` is what a router needs and all that it decodes; `GenerationRequest` adds what only the engine needs.
The replica's parser builds the second on top of the first, by the same functions: a router is never stricter than a
replica, and both derive the same prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from shared.api_errors import invalid_value
from shared.api_fields import Fields
from shared.prompts import PromptInput

__all__ = [
    "GenerationRequest",
    "MOST_TOKENS",
    "RoutingFields",
    "agreed",
    "logit_bias",
    "most_likely",
    "nucleus",
    "sampling_seed",
    "stop_strings",
    "stop_token_ids",
]

MOST_TOKENS = (1 << 31) - 1
_MOST_STOPS = 16
_LONGEST_STOP = 1024
_MOST_STOP_TOKENS = 256
_MOST_BIASES = 1024
_LARGEST_BIAS = 100.0
_MOST_TOKEN_ID = (1 << 32) - 1


class RoutingFields(msgspec.Struct, frozen=True):
    """`max_tokens` None means as many as the context holds, 0 that the prompt is computed for the cache alone.

    `session` and `user` are hints and may be empty.
    """

    model: str
    prompt: PromptInput
    stream: bool
    max_tokens: int | None
    session: str
    user: str


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    routing: RoutingFields
    include_usage: bool
    """Streams end with a usage chunk. Whole answers always carry usage."""
    temperature: float
    top_p: float
    top_k: int
    """0 switches the filter off."""
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    n: int = 1
    """How many answers."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None
    """Log probabilities of each token and so many likeliest ones; None: of none."""
    keep_seconds: float = 0.0
    """The wish that its prompt stays cached for so long."""


def stop_strings(fields: Fields, name: str) -> tuple[str, ...]:
    return fields.texts(name, most=_MOST_STOPS, longest=_LONGEST_STOP)


def stop_token_ids(fields: Fields) -> frozenset[int]:
    return frozenset(fields.token_ids("stop_token_ids", most=_MOST_STOP_TOKENS))


def sampling_seed(fields: Fields) -> int | None:
    return fields.integer("seed", -(1 << 63), (1 << 63) - 1)


def nucleus(fields: Fields) -> float:
    return fields.number("top_p", 0, 1, default=1.0, above_low=True)


def most_likely(fields: Fields) -> int:
    """`top_k`: absent, 0 and -1 all switch it off."""
    return max(0, fields.integer("top_k", -1, MOST_TOKENS) or 0)


def logit_bias(fields: Fields) -> dict[int, float]:
    """Token ids, spelled as strings as JSON's keys are, to what is added to their logits."""
    values = fields.mapping("logit_bias")
    if len(values) > _MOST_BIASES:
        raise invalid_value(fields.path("logit_bias"), f"has {len(values)} entries: at most {_MOST_BIASES} are allowed")
    biases = Fields(values, fields.path("logit_bias"))
    result = {}
    for name in values:
        if not (name.isdecimal() and name.isascii()) or len(name) > 10 or int(name) > _MOST_TOKEN_ID:
            raise invalid_value(fields.path("logit_bias"), f"must map token ids to numbers; {name[:20]!r} is none")
        result[int(name)] = biases.number(name, -_LARGEST_BIAS, _LARGEST_BIAS, default=0.0)
    return result


def agreed(fields: Fields, first: str, second: str) -> int | None:
    """One limit under an old and a new name. Sent under both, they must agree."""
    limits = {fields.integer(name, 1, MOST_TOKENS) for name in (first, second)} - {None}
    if len(limits) > 1:
        raise invalid_value(fields.path(second), f"contradicts {fields.path(first)}: send one of them")
    return limits.pop() if limits else None
