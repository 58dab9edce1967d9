"""Cuts a text where the tokenizer itself cuts it, into runs that can be encoded, and remembered, one by one.

A tokenizer takes its added tokens (`<|im_start|>`, ...) out of the text first and treats each piece between them by
itself. So encoding the pieces one by one gives the ids of the whole, as long as every piece still sees what the
tokenizer looks at across the cut. Each run therefore starts with the added token at whose left it was cut:

    <|im_start|>system ... | <|im_end|>\\n<|im_start|>user ... | <|im_end|>\\n<|im_start|>assistant\\n
    run 0                    run 1                              run 2

A cut is made at the first such token that leaves at least `MIN_RUN_CHARACTERS` behind: it depends on the text to its
left alone, so a conversation that grows keeps all its runs but the last. Where the tokenizer is one that never joins
words (see `word_memo`), a long run is cut between two words too: what is done for each run holds up nobody for long.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from tokenizers import Tokenizer

__all__ = ["MIN_RUN_CHARACTERS", "TextRuns", "joins_no_words"]

MIN_RUN_CHARACTERS = 1024
_LONG_RUN_CHARACTERS = 8192
_BETWEEN_WORDS = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])|(?<=\n)(?=[A-Za-z])")


class TextRuns:
    """`split` loses nothing: joined, the runs are the text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        min_run_characters: int = MIN_RUN_CHARACTERS,
        long_run_characters: int = _LONG_RUN_CHARACTERS,
        *,
        parts_words: bool = False,
    ) -> None:
        """`parts_words`: the tokenizer never joins what `joins_no_words` names."""
        self._min_run_characters = min_run_characters
        self._long_run_characters = long_run_characters if parts_words else sys.maxsize
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
        """Runs that end before `last`, and the rest."""
        runs: list[str] = []
        start = 0
        if len(text) > self._min_run_characters:
            for match in self._added.finditer(text):
                at = match.start()
                if at > last:
                    break
                start = self._cut_between_words(text, start, at, runs)
                if at - start >= self._min_run_characters and match.group() in self._cuttable:
                    runs.append(text[start:at])
                    start = at
            start = self._cut_between_words(text, start, last, runs)
        return runs, text[start:]

    def _cut_between_words(self, text: str, start: int, end: int, runs: list[str]) -> int:
        """Where what is left begins."""
        while end - start > self._long_run_characters:
            match = _BETWEEN_WORDS.search(text, start + self._long_run_characters, end)
            if match is None:
                break
            runs.append(text[start : match.start()])
            start = match.start()
        return start


def joins_no_words(words: re.Pattern[str], added: Iterable[str]) -> bool:
    """Whether text may be cut between two words whatever is around them, where these are a tokenizer's words."""
    if any(" " in content or "\n" in content for content in added):
        return False
    for tried in ("xa| bx", "X-a| B9", "don't| s", "\n a| The", "a\n|bx", "\n \n|Bx", "-\n|s "):
        at = tried.index("|")
        if at not in {match.start() for match in words.finditer(tried.replace("|", ""))}:
            return False
    return True


def _is_wordlike(character: str) -> bool:
    return character.isalnum() or character == "_" or character.isspace()
