"""What the engine tells: of each request after each step, and of itself."""

from __future__ import annotations

from dataclasses import dataclass

from replica.runner import TokenLogprobs
from replica.scheduler import Counters, Progress
from replica.sequence import FinishReason, Sequence
from shared.fleet_records import CostCoefficients, ReplicaLoad

__all__ = ["EngineState", "TokenEvent", "event_of"]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What a step brought one request. The last event of a request, and only that, has a `finish_reason`.

    With `STOP` the last token is the stop token itself, which belongs to usage but not to the text.
    """

    request_id: str
    token_ids: tuple[int, ...]
    cached_tokens: int
    finish_reason: FinishReason | None = None
    error: str | None = None
    first: bool = False
    """The first event that carries a token."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, where the request asks for them."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """As of the end of the last step or inbox. One object, replaced as a whole: a consistent view from any thread."""

    load: ReplicaLoad
    cost: CostCoefficients | None
    onload_seconds_per_token: float | None
    """Measured; None: not yet."""
    counters: Counters
    evictions: dict[str, int]
    held_blocks: int
    host_held_blocks: int
    steps: int
    failed_steps: int


def event_of(
    sequence: Sequence, progress: Progress | None, reason: FinishReason | None = None, error: str | None = None
) -> TokenEvent:
    token = None if progress is None else progress.token
    logprobs = None if progress is None else progress.logprobs
    token_ids = () if token is None else (token,)
    first = bool(token_ids) and sequence.output_tokens == len(token_ids)
    return TokenEvent(
        sequence.request_id,
        token_ids,
        sequence.cached_tokens,
        reason,
        error,
        first,
        () if logprobs is None else (logprobs,),
    )
