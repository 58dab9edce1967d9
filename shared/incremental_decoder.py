"""Token ids, as they are sampled -> pieces of text that never end in half a character."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer

__all__ = ["IncrementalDecoder"]

_REPLACEMENT = "\ufffd"
_MAX_UNSETTLED = 3
"""A UTF-8 character has at most 4 bytes, so at most 3 are waiting for the rest: as many replacement marks."""
_MAX_WINDOW_TOKENS = 24
_KEPT_TOKENS = 8


class IncrementalDecoder:
    """The pieces, joined, are the decoded whole; each token costs a constant amount of work.

    Only a window of the last tokens is decoded. What was given out of it is known by its length; a tail that may yet
    become a character is held back:

        window    [ t-7 ... t ]  ->  "… the price is 5 \ufffd"
                                      given out --------^  held back

    (One exception, which no stream can mend: SentencePiece byte tokens followed directly by an invalid byte. The whole
    then shows all of them as replacement marks, though the valid ones were already given out as characters.)
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._given = 0

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens settle; often one token's, sometimes none."""
        self._window.extend(ids)
        text = self._decode()
        settled = len(text)
        while settled > max(self._given, len(text) - _MAX_UNSETTLED) and text[settled - 1] == _REPLACEMENT:
            settled -= 1
        piece = text[self._given : settled]
        self._given = max(self._given, settled)
        if len(self._window) > _MAX_WINDOW_TOKENS:
            held = len(text) - self._given
            # The left end of the shorter window may read differently (half a character); its right end does not.
            self._window = self._window[-_KEPT_TOKENS:]
            self._given = max(0, len(self._decode()) - held)
        return piece

    def flush(self) -> str:
        """What was still held back, as it stands; call it once, at the end."""
        return self._decode()[self._given :]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)
