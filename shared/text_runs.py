"""Cuts a text where the tokenizer itself cuts it, into runs that can be encoded, and remembered, one by one.

A tokenizer takes its added tokens (`<|im_start|>`, ...) out of the text first and treats each piece between them by
itself. So encoding the pieces one by one gives the ids of the whole, as long as every piece still sees what the
tokenizer looks at across the cut. Each run therefore starts with the added token at whose left it was cut:

    <|im_start|>system ... | <|im_end|>\\n<|im_start|>user ... | <|im_end|>\\n<|im_start|>assistant\\n
    run 0                    run 1                              run 2

A cut is made at the first such token that leaves at least `MIN_RUN_CHARACTERS` behind: it depends on the text to its
left alone, so a conversation that grows keeps all its runs but the last.
"""

from __future__ import annotations

import re

from tokenizers import Tokenizer

__all__ = ["MIN_RUN_CHARACTERS", "TextRuns"]

MIN_RUN_CHARACTERS = 1024


class TextRuns:
    """`split` loses nothing: joined, the runs are the text."""

    def __init__(self, tokenizer: Tokenizer, min_run_characters: int = MIN_RUN_CHARACTERS) -> None:
        self._min_run_characters = min_run_characters
        # Tokens marked `normalized` are looked for later, in the normalized pieces: never across these cuts.
        added = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.normalized]
        looks_left = any(token.single_word or token.rstrip for token in added)
        longest_first = sorted({token.content for token in added if token.content}, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._longest = len(longest_first[0]) if longest_first else 0
        # A token that takes whitespace on its left, or minds its neighbours, is found but not cut at; nor is one that
        # a neighbour on its left could mind.
        self._cuttable = {
            token.content
            for token in added
            if not (token.lstrip or token.single_word) and not (looks_left and _is_wordlike(token.content[:1]))
        }

    def split(self, text: str) -> list[str]:
        runs, rest = self._cut(text, len(text))
        if rest:
            runs.append(rest)
        return runs

    def split_opening(self, text: str) -> tuple[list[str], str]:
        """The runs that every text begins with that begins with this one, and what remains of it."""
        return self._cut(text, len(text) - self._longest)

    def _cut(self, text: str, last: int) -> tuple[list[str], str]:
        runs = []
        start = 0
        if len(text) > self._min_run_characters:
            for match in self._added.finditer(text):
                at = match.start()
                if at > last:
                    break
                if at - start >= self._min_run_characters and match.group() in self._cuttable:
                    runs.append(text[start:at])
                    start = at
        return runs, text[start:]


def _is_wordlike(character: str) -> bool:
    return character.isalnum() or character == "_" or character.isspace()
