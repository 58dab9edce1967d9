"""One request's answer as it grows: token ids in from the engine, text out to whoever writes it to the client.

    engine thread -> (one call per step) -> Answer.push -> [ text not yet taken ] -> Answer.next -> client

Text waits in one place, so a slow client costs at most the length of its answer. Half a UTF-8 character and what may be
the start of a stop string are held back. Everything here runs in the event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from replica.engine import TokenEvent
from replica.sequence import FinishReason
from replica.stop_strings import StopStrings
from shared.api_errors import ApiError, internal_error, not_ready

__all__ = ["Answer", "Finish", "Part", "TextDecoder", "Usage"]


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

    @property
    def failure(self) -> ApiError | None:
        """What to tell the client where this is no answer."""
        match self.reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                return None
            case FinishReason.ABORT:
                return not_ready("this replica is shutting down and could not finish the answer: ask again")
            case FinishReason.ERROR:
                return internal_error(self.error or "the engine failed on this request: ask again")


@dataclass(frozen=True, slots=True)
class Part:
    """What came since the last part. The first part comes with the first token, even if its text is held back."""

    text: str
    finish: Finish | None


class Answer:
    def __init__(
        self,
        prompt_tokens: int,
        block_size: int,
        decoder: TextDecoder,
        stops: tuple[str, ...],
        end_token_ids: frozenset[int],
        arrival_seconds: float,
    ) -> None:
        """`end_token_ids` end the answer and are not part of its text."""
        self._prompt_tokens = prompt_tokens
        self._block_size = block_size
        self._decoder = decoder
        self._stops = StopStrings(stops)
        self._end_token_ids = end_token_ids
        self._changed = asyncio.Event()
        self._text: list[str] = []
        self._finish: Finish | None = None
        self._completion_tokens = 0
        self._cached_tokens = 0
        self.computing = True
        """The engine may still be working on it."""
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
        self._cached_tokens = event.cached_tokens
        self._completion_tokens += len(event.token_ids)
        shown = event.token_ids
        if event.finish_reason is FinishReason.STOP and shown and shown[-1] in self._end_token_ids:
            shown = shown[:-1]
        cut = self._stops.push(self._decoder.push(shown))
        self._text.append(cut.text)
        if cut.matched is not None:
            self._finish = Finish(FinishReason.STOP, stop_string=cut.matched)
        if event.finish_reason is not None:
            self.computing = False
            self.end(Finish(event.finish_reason, error=event.error))
        self._changed.set()

    def end(self, finish: Finish) -> None:
        """No more tokens will come. What was held back is text after all, unless a stop string has ended it before."""
        if self._finish is None:
            cut = self._stops.push(self._decoder.flush())
            self._text += (cut.text, "" if cut.matched else self._stops.flush())
            self._finish = finish if cut.matched is None else Finish(FinishReason.STOP, stop_string=cut.matched)
        self._changed.set()

    async def next(self) -> Part:
        """Wait for more and take all of it. Not to be called again after a part with `finish`."""
        await self._changed.wait()
        self._changed.clear()
        text = "".join(self._text)
        self._text.clear()
        return Part(text, self._finish)
