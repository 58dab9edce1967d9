"""Token ids, as they are sampled -> pieces of text that never end in half a character."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer

__all__ = ["IncrementalDecoder"]

_REPLACEMENT = "\ufffd"
_MAX_OPEN_BYTES = 3
"""A UTF-8 character has at most 4 bytes, so at most 3 can be waiting for the rest."""
_MAX_WINDOW_TOKENS = 24
_KEPT_TOKENS = 8


class IncrementalDecoder:
    """The pieces, joined, are the decoded whole, and each token costs a constant amount of work.

    Only a short window is decoded: the tokens of the last piece, since a decoder may mind what is on the left, and
    those not yet given out. A tail that may yet become a character is held back:

        window    [ ▁price ][ ▁5 ]  [ <0xE2> <0x82> ]
                    last piece        held back, until <0xAC> makes it a €

    One exception, which no stream can mend: where SentencePiece byte tokens turn out to be invalid, the whole shows
    even the valid ones next to them as replacement marks, though they were given out as characters before.
    """

    def __init__(self, tokenizer: Tokenizer, hidden_ids: frozenset[int] = frozenset()) -> None:
        """`hidden_ids` give no text: the special tokens, as a rule."""
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._window: list[int] = []
        self._given_tokens = 0
        self._given_characters = 0

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens settle; often one token's, sometimes none."""
        return "".join([self._push(token) for token in ids if token not in self._hidden_ids])

    def flush(self) -> str:
        """What was still held back, as it stands; call it once, at the end."""
        return self._decode()[self._given_characters :]

    @property
    def window_tokens(self) -> int:
        return len(self._window)

    def _push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode()
        settled = len(text)
        if text.endswith(_REPLACEMENT):
            if len(self._window) - self._given_tokens <= _MAX_OPEN_BYTES:
                return ""
            # More bytes than a character has: all but those that may begin the next one are invalid for good.
            while settled > len(text) - _MAX_OPEN_BYTES and text[settled - 1 : settled] == _REPLACEMENT:
                settled -= 1
        piece = text[self._given_characters : settled]
        self._given_characters = max(self._given_characters, settled)
        if piece and settled == len(text):
            self._shorten_window(self._given_tokens, held_characters=0)
            self._given_tokens = len(self._window)
        elif len(self._window) > _MAX_WINDOW_TOKENS:
            self._shorten_window(len(self._window) - _KEPT_TOKENS, held_characters=len(text) - self._given_characters)
            self._given_tokens = 0
        return piece

    def _shorten_window(self, dropped_tokens: int, held_characters: int) -> None:
        # The left end of the shorter window may read differently (half a character); its right end does not.
        self._window = self._window[dropped_tokens:]
        self._given_characters = max(0, len(self._decode()) - held_characters)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)
