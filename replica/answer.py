"""One answer as it grows: token ids in from the engine, text out to whoever writes it to the client.

    engine thread -> (one call per step) -> Answer.push -> [ text not yet taken ] -> Answer.take -> client

Text waits in one place, so a slow client costs at most the length of its answer. Half a UTF-8 character and what may be
the start of a stop string are held back, and the log probabilities of their tokens with them: what is told of tokens is
told of text that is shown. Everything here runs in the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from replica.engine_events import TokenEvent
from replica.runner import TokenLogprobs
from replica.sequence import FinishReason
from replica.stop_strings import StopStrings
from shared.api_errors import ApiError, cache_precondition_failed, internal_error, not_ready

__all__ = ["Answer", "Finish", "Part", "ShownToken", "TextDecoder", "Usage"]


class TextDecoder(Protocol):
    """Token ids to text, holding back what is not yet a whole character."""

    def push(self, token_ids: tuple[int, ...]) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    """Prompt tokens that this request added to the cache: its full blocks that were not there."""


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    stop_string: str | None = None
    error: str | None = None
    held_tokens: int = 0
    """What the cache holds of a prompt that was refused as too cold."""

    @property
    def failure(self) -> ApiError | None:
        """What to tell the client where this is no answer."""
        match self.reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                return None
            case FinishReason.ABORT:
                return not_ready("this replica is shutting down and could not finish the answer: ask again")
            case FinishReason.COLD:
                return cache_precondition_failed(self.held_tokens)
            case FinishReason.ERROR:
                return internal_error(self.error or "the engine failed on this request: ask again")


class ShownToken(NamedTuple):
    """A token whose text has been shown, and where in the answer that text begins, in characters."""

    offset: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Part:
    """What came since the last part. The first part comes with the first token, even if its text is held back."""

    text: str
    finish: Finish | None
    tokens: tuple[ShownToken, ...] = ()
    """Those whose text has begun to show, where log probabilities were asked for."""
    index: int = 0
    """Which of the request's answers grew."""


class Answer:
    def __init__(
        self,
        prompt_tokens: int,
        block_size: int,
        decoder: TextDecoder,
        stops: tuple[str, ...],
        end_token_ids: frozenset[int],
        arrival_seconds: float,
        index: int = 0,
        changed: asyncio.Event | None = None,
    ) -> None:
        """`end_token_ids` end the answer and are not part of its text. `changed` is set whenever there is more."""
        self.index = index
        self._prompt_tokens = prompt_tokens
        self._block_size = block_size
        self._decoder = decoder
        self._stops = StopStrings(stops)
        self._end_token_ids = end_token_ids
        self._changed = changed or asyncio.Event()
        self._text: list[str] = []
        self._untold: deque[ShownToken] = deque()
        self._decoded_characters = self._shown_characters = 0
        self._finish: Finish | None = None
        self._completion_tokens = 0
        self._cached_tokens = 0
        self.computing = True
        """The engine may still be working on it."""
        self.begun = False
        """Something came: the cached tokens are known."""
        self.fresh = False
        """Something came since it was taken from."""
        self.arrival_seconds = arrival_seconds
        self.first_token_seconds = arrival_seconds

    @property
    def finish(self) -> Finish | None:
        return self._finish

    @property
    def usage(self) -> Usage:
        whole_blocks = self._prompt_tokens - self._prompt_tokens % self._block_size
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=self._cached_tokens,
            cache_write_tokens=max(0, whole_blocks - self._cached_tokens),
        )

    def push(self, event: TokenEvent) -> None:
        """Take what one engine step brought. Not to be called once there is a `finish`."""
        self.begun = True
        self._cached_tokens = event.cached_tokens
        self._completion_tokens += len(event.token_ids)
        shown = event.token_ids
        if event.finish_reason is FinishReason.STOP and shown and shown[-1] in self._end_token_ids:
            shown = shown[:-1]
        cut = self._stops.push(self._decode(shown, event.logprobs))
        self._show(cut.text)
        if cut.matched is not None:
            self._finish = Finish(FinishReason.STOP, stop_string=cut.matched)
        if event.finish_reason is not None:
            self.computing = False
            self.end(Finish(event.finish_reason, error=event.error, held_tokens=event.cached_tokens))
        self._note_change()

    def end(self, finish: Finish) -> None:
        """No more tokens will come. What was held back is text after all, unless a stop string has ended it before."""
        if self._finish is None:
            cut = self._stops.push(self._decoder.flush())
            self._show(cut.text + ("" if cut.matched else self._stops.flush()))
            self._finish = finish if cut.matched is None else Finish(FinishReason.STOP, stop_string=cut.matched)
            self._note_change()

    def take(self) -> Part:
        """All that came since the last time. Not to be called again after a part with `finish`."""
        text = "".join(self._text)
        self._text.clear()
        self.fresh = False
        return Part(text, self._finish, tuple(self._tell()) if self._untold else (), self.index)

    def _decode(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> str:
        if not logprobs:
            return self._decoder.push(token_ids)
        text = ""
        for token, its_logprobs in zip(token_ids, logprobs, strict=False):  # the last may be one that is not shown
            self._untold.append(ShownToken(self._decoded_characters + len(text), its_logprobs))
            text += self._decoder.push((token,))
        self._decoded_characters += len(text)
        return text

    def _show(self, text: str) -> None:
        self._text.append(text)
        self._shown_characters += len(text)

    def _tell(self) -> Iterator[ShownToken]:
        """Of the tokens not told yet, those whose text has begun to show; in the end all that a stop string left."""
        ended = self._finish is not None and self._finish.stop_string is None
        while self._untold and (ended or self._untold[0].offset < self._shown_characters):
            yield self._untold.popleft()

    def _note_change(self) -> None:
        self.fresh = True
        self._changed.set()
