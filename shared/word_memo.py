"""Token ids of short texts by their words: what a word becomes is remembered, and most words are met again.

A byte-level BPE tokenizer cuts a text by a regular expression and encodes each of the words so found by itself. Where
that expression can be said in Python's terms, for the alphabet below, the words are found here:

    " the quick fox"  ->  " the", " quick", " fox"  ->  ids of each, remembered, put together

Everything else is the tokenizer's: tokenizers of other kinds, and texts with characters beyond the alphabet.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import msgspec
from tokenizers import Tokenizer

from shared.blocks import pack_tokens, unpack_tokens
from shared.text_runs import joins_no_words

__all__ = ["WordMemo", "word_memo_of"]

_MOST_WORDS = 1 << 15
_LONGEST_WORD = 48
"""Characters of a word that is remembered: all words together take some 10 MB at most."""
_LONGEST_TEXT = 16_384
"""The tokenizer lets other threads run meanwhile, this does not."""
_LINES_OF_PROBES = 64
_PROBED_WORDS = 64
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SCRIPTS = (range(0x530), range(0x2010, 0x2028), range(0x2030, 0x205F))
"""Latin, Greek, Cyrillic, dashes and quotation marks. Beyond are marks that combine, and words without spaces."""
_TWO_CASES_OF_S = "\u017f"
_PIECE = re.compile(
    r"\\p\{(?P<category>[LMNPS][a-z]?)\}|(?P<spaces>\\s)|(?P<others>\\S)|(?P<escaped>\\[rnt/.'\-\[\]\\])"
    r"|(?P<open>\[\^?)|(?P<close>\])|(?P<group>\(\?(?:i?:|!|=))|(?P<plain>[^\\\[\]$.^(&])"
)


class WordMemo:
    """For any thread."""

    def __init__(self, tokenizer: Tokenizer, words: re.Pattern[str], most_words: int = _MOST_WORDS) -> None:
        added = tokenizer.get_added_tokens_decoder()
        plain = {token.content: index for index, token in added.items() if _is_plain(token)}
        special = [token.content for token in added.values() if token.content not in plain]
        self._split = re.compile(f"({_any_of(plain)})").split
        self._find = words.findall
        self.joins_no_words = not special and joins_no_words(words, plain)
        """See `text_runs`."""
        self._is_beyond = re.compile("|".join([f"[^{_members(_anything)}]", *map(re.escape, special)])).search
        self._known = _KnownWords(tokenizer.model, plain, most_words)

    def __len__(self) -> int:
        """Words that are known."""
        return len(self._known)

    def ids(self, text: str) -> bytes | None:
        """Packed, as in block keys; None where the tokenizer has to be asked."""
        if len(text) > _LONGEST_TEXT or self._is_beyond(text):
            return None
        words: list[str] = []
        for number, piece in enumerate(self._split(text)):
            if number & 1:
                words.append(piece)
            elif piece:
                words += self._find(piece)
        if "".join(words) != text:
            return None
        return b"".join(map(self._known.__getitem__, words))


class _KnownWords(dict[str, bytes]):
    """Bounded: once it is full it begins anew."""

    def __init__(self, model: Any, added: dict[str, int], most_words: int) -> None:
        self._model = model
        self._added = {content: pack_tokens([index]) for content, index in added.items()}
        self._most_words = most_words
        super().__init__(self._added)

    def __missing__(self, word: str) -> bytes:
        spelled = word.encode().decode("latin-1").translate(_byte_letters())
        ids = pack_tokens([token.id for token in self._model.tokenize(spelled)])
        if len(word) <= _LONGEST_WORD:
            if len(self) >= self._most_words:
                self.clear()
                self.update(self._added)
            self[word] = ids
        return ids


def word_memo_of(tokenizer: Tokenizer, tokenizer_json: bytes, most_words: int = _MOST_WORDS) -> WordMemo | None:
    """None where this tokenizer's words cannot be found here: by its description, and by trying."""
    pattern = _pattern_of(tokenizer_json)
    if pattern is None or any(
        not (_is_plain(token) or token.content.isascii()) for token in tokenizer.get_added_tokens_decoder().values()
    ):
        return None
    memo = WordMemo(tokenizer, pattern, most_words)
    return memo if _agrees(memo, tokenizer) else None


def _is_plain(token: Any) -> bool:
    return bool(token.content) and not (token.normalized or token.lstrip or token.rstrip or token.single_word)


def _any_of(contents: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(contents, key=len, reverse=True))) or r"(?!)"


@cache
def _byte_letters() -> dict[int, int]:
    """How a byte-level vocabulary spells bytes: printable ones by themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: 0x100 + number for number, byte in enumerate(others)}


@cache
def _alphabet() -> tuple[str, ...]:
    """Characters that are the same in all versions of Unicode, do not combine, and stay as they are in NFC."""
    characters = (chr(code) for script in _SCRIPTS for code in script)
    return tuple(
        character
        for character in characters
        if unicodedata.category(character) not in ("Cn", "Mn", "Me", "Mc", "Cf")
        and unicodedata.is_normalized("NFC", character)
        and character != _TWO_CASES_OF_S
    )


def _anything(character: str) -> bool:
    return True


@cache
def _members(belongs: Callable[[str], bool] | str) -> str:
    """Of the alphabet, as they stand within brackets: all of a category, or those that `belongs` says."""
    if isinstance(belongs, str):
        members = [character for character in _alphabet() if unicodedata.category(character).startswith(belongs)]
    else:
        members = [character for character in _alphabet() if belongs(character)]
    ranges: list[list[int]] = []
    for code in map(ord, members):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\u{first:04x}-\\u{last:04x}" for first, last in ranges)


def _is_space(character: str) -> bool:
    return character.isspace() and character not in "\x1c\x1d\x1e\x1f"  # which only Python takes for spaces


class _Model(msgspec.Struct):
    type: str = ""
    dropout: float | None = None


class _Description(msgspec.Struct):
    """Of a `tokenizer.json`, but for its vocabulary."""

    model: _Model
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


def _pattern_of(tokenizer_json: bytes) -> re.Pattern[str] | None:
    try:
        description = msgspec.json.decode(tokenizer_json, type=_Description)
    except msgspec.MsgspecError:
        return None
    if description.model.type != "BPE" or description.model.dropout:
        return None
    if any(step.get("type") != "NFC" for step in _steps(description.normalizer, "normalizers")):
        return None
    match _steps(description.pre_tokenizer, "pretokenizers"):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return _in_python(_GPT2)
        case [
            {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return _in_python(regex)
    return None


def _steps(described: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if described is None:
        return []
    return described.get(inner, []) if described.get("type") == "Sequence" else [described]


def _in_python(regex: str) -> re.Pattern[str] | None:
    """The same matches within the alphabet; None where it says what is not known to mean the same here."""
    pieces, at, inside = [], 0, False
    while at < len(regex):
        match = _PIECE.match(regex, at)
        if match is None or (inside and (match["open"] or match["others"])):
            return None
        at = match.end()
        if match["category"] or match["spaces"] or match["others"]:
            members = _members(match["category"] or _is_space)
            if not (members or inside):
                return None
            pieces.append(members if inside else f"[{'^' if match['others'] else ''}{members}]")
        else:
            inside = bool(match["open"]) or (inside and not match["close"])
            pieces.append(match.group())
    try:
        return re.compile("".join(pieces))
    except re.error:
        return None


def _agrees(memo: WordMemo, tokenizer: Tokenizer) -> bool:
    """Tried on every character of the alphabet, among words of the vocabulary and other surroundings."""
    chooser = random.Random(0)
    vocabulary = chooser.choices(range(tokenizer.get_vocab_size(with_added_tokens=False)), k=_PROBED_WORDS)
    around = [" ", "  ", "\n", "\r\n", "a", " don't", "'LL", "7", " 1234", "==", "</", ""]
    around += [word for word in map(tokenizer.decode, zip(vocabulary)) if memo.ids(word) is not None]
    characters = list(_alphabet())
    chooser.shuffle(characters)
    for line in range(_LINES_OF_PROBES):
        text = "".join(chooser.choice(around) + character for character in characters[line::_LINES_OF_PROBES])
        ids = memo.ids(text)
        if ids is None or unpack_tokens(ids) != tokenizer.encode(text, add_special_tokens=False).ids:
            return False
    return True
