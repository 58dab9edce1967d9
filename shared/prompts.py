"""A request's prompt -> the engine's token ids and block keys: one class for both tiers, so they agree by construction.

    prepare(prompt)           renders the template, looks the runs of the text up in the memo     on the event loop
    tokenize_missing(...)     tokenizes what is new; pure, long texts belong in an executor       on any thread
    finish(...)               remembers it and returns the EncodedPrompt                          on the event loop
    keys(encoded, root, B)    the published block keys, of which only the new tail is hashed      on the event loop

A text prompt gets its special tokens as the tokenizer's post-processor adds them; a chat prompt has those that its
template wrote, and no more. The memos are bounded by bytes and hold prompts no longer than that.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple, final

import msgspec
from tokenizers import Tokenizer

from shared.blocks import BlockKey, PublishedKey, pack_tokens, published_keys, unpack_tokens
from shared.byte_lru import ByteLru
from shared.chat_template import ChatTemplate, PromptError
from shared.incremental_decoder import IncrementalDecoder
from shared.key_memo import KeyMemo, Run
from shared.public_prefixes import Namespace
from shared.template_splice import Rendered
from shared.text_runs import MIN_RUN_CHARACTERS, TextRuns
from shared.tokenizer_bundle import BundleError, TokenizerBundle
from shared.word_memo import WordMemo, word_memo_of

__all__ = [
    "ChatPrompt",
    "EncodedPrompt",
    "IncrementalDecoder",
    "PreparedPrompt",
    "PromptEncoder",
    "PromptError",
    "PromptInput",
    "TextPrompt",
    "TokenPrompt",
    "TokenizerBundle",
]

_DEFAULT_MEMO_BYTES = 256 * 2**20
_MOST_OPEN_BYTES = 4 * 2**20
"""For the ends of prompts, of which hardly one comes twice: what is kept of each must not push out what is shared."""
_BYTES_PER_RUN = 8192
"""Of a prompt that came as token ids."""
_RUN_OVERHEAD_BYTES = 400
_GOLDEN_TEXT = "Warm prefixes route well: naïve café, 東京, 🙂 42.\n\n"
_GOLDEN_MESSAGES = (
    {"role": "user", "content": f" {_GOLDEN_TEXT}"},
    {"role": "assistant", "content": "<think>\nWhy?\n</think>\n\nBecause. "},
    {"role": "user", "content": _GOLDEN_TEXT},
)
_GOLDEN_DATE = datetime(2025, 1, 2, 3, 4, 5)
_PROBES = 48
_HARD_TEXTS = (
    "x",
    " ",
    "  a",
    "\n\n",
    "naïve ",
    "\u00a0",
    "東京",
    "1 2",
    "\u0301",
    "é\n",
    "▁",
    "🙂",
    "_b",
    "",
    "'s",
    "<",
)


class ChatPrompt(msgspec.Struct, frozen=True):
    """Messages as they came, as OpenAI's JSON has them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = msgspec.field(default_factory=dict)


class TextPrompt(msgspec.Struct, frozen=True):
    text: str


class TokenPrompt(msgspec.Struct, frozen=True):
    ids: Sequence[int]


PromptInput = ChatPrompt | TextPrompt | TokenPrompt


class EncodedPrompt(msgspec.Struct, frozen=True, dict=True):
    runs: tuple[Run, ...]
    token_count: int

    @cached_property
    def token_ids(self) -> list[int]:
        return unpack_tokens(b"".join([run.packed for run in self.runs]))

    def openings(self, runs: int) -> Iterator[EncodedPrompt]:
        """Of growing length, by so many runs each; not the whole."""
        for end in range(runs, len(self.runs), runs):
            opening = self.runs[:end]
            yield EncodedPrompt(opening, sum([len(run.packed) for run in opening]) // 4)

    def behind(self, tokens: int) -> EncodedPrompt:
        """What follows the first `tokens`."""
        runs, left = [], 4 * tokens
        for run in self.runs:
            if left < len(run.packed):
                runs.append(run if left == 0 else Run(run.packed[left:], None))
            left = max(0, left - len(run.packed))
        return EncodedPrompt(tuple(runs), max(0, self.token_count - tokens))


class _Opening(msgspec.Struct, frozen=True, gc=False):
    """What prompts begin with that are rendered alike but for their last message."""

    runs: tuple[tuple[str, str], ...]
    """By their keys in the memo."""
    rest: str


@final
class _NewRun:
    """A piece of the prompt that the memo does not hold: its text until it is tokenized, then its ids too."""

    __slots__ = ("memo_key", "packed")

    def __init__(self, memo_key: tuple[str, str | bytes], packed: bytes | None = None) -> None:
        self.memo_key = memo_key
        self.packed = packed


class PreparedPrompt(msgspec.Struct, frozen=True):
    """`unseen_characters` tells how much text `tokenize_missing` will have to tokenize: about 1 us for each 3."""

    pieces: list[Run | _NewRun]
    unseen_characters: int


class PromptEncoder:
    """Not for several threads at once, except `tokenize_missing`, `decode` and the decoders it makes."""

    def __init__(self, bundle: TokenizerBundle, memo_bytes: int = _DEFAULT_MEMO_BYTES) -> None:
        """Raises BundleError where the tokenizer or its template cannot be loaded."""
        self.bundle = bundle
        self.tokenizer = _load_tokenizer(bundle.tokenizer_json)
        self.vocabulary_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_ids = frozenset(
            index for index, token in self.tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._template = (
            None if bundle.chat_template is None else ChatTemplate(bundle.chat_template, bundle.special_tokens)
        )
        try:
            self._text_ends = _text_ends(self.tokenizer)
            self._words = word_memo_of(self.tokenizer, bundle.tokenizer_json)
            self._text_runs = _exact_text_runs(self.tokenizer, self._text_ends, self._words)
            if self._text_runs is None:
                self._words = None
        except Exception as error:  # the bindings raise plain Exception
            raise BundleError(f"the tokenizer fails on ordinary text: {error}") from error
        open_bytes, opening_bytes = min(memo_bytes // 16, _MOST_OPEN_BYTES), memo_bytes // 16
        self._openings: ByteLru[str, _Opening] = ByteLru(opening_bytes)
        self._open_runs: ByteLru[tuple[str, str | bytes], Run] = ByteLru(open_bytes)
        self._runs: ByteLru[tuple[str, str | bytes], Run] = ByteLru(memo_bytes // 2 - open_bytes - opening_bytes)
        self._serials = itertools.count()
        self._key_memo = KeyMemo(memo_bytes // 2)

    def encode(self, prompt: PromptInput) -> EncodedPrompt:
        """All three steps at once. Raises PromptError."""
        prepared = self.prepare(prompt)
        self.tokenize_missing(prepared)
        return self.finish(prepared)

    def prepare(self, prompt: PromptInput) -> PreparedPrompt:
        """Raises PromptError, which names the field at fault."""
        match prompt:
            case ChatPrompt():
                return self._prepare_text(*self._render(prompt), special_tokens=False)
            case TextPrompt(text):
                return self._prepare_text("", text, special_tokens=True)
            case TokenPrompt(ids):
                return self._prepare_ids(ids)

    def tokenize_missing(self, prepared: PreparedPrompt) -> None:
        """Fills in the ids of what the memo did not know. Touches nothing but `prepared`. Raises PromptError."""
        for piece in prepared.pieces:
            if type(piece) is _NewRun and piece.packed is None:
                kind, text = piece.memo_key
                assert isinstance(text, str), "ids are not tokenized"
                packed = self._words.ids(text) if self._words is not None and kind == "run" else None
                piece.packed = self._tokenize(text, special_tokens=kind == "whole") if packed is None else packed
                time.sleep(0)  # lets go of the interpreter

    def finish(self, prepared: PreparedPrompt) -> EncodedPrompt:
        """Remembers what was new. Raises PromptError where the prompt has no tokens at all."""
        runs = tuple([self._remember(piece) if type(piece) is _NewRun else piece for piece in prepared.pieces])
        token_count = sum([len(run.packed) for run in runs]) // 4
        if token_count == 0:
            raise PromptError("the prompt is empty", "prompt")
        return EncodedPrompt(runs, token_count)

    def keys(self, encoded: EncodedPrompt, root: BlockKey, block_size: int) -> list[PublishedKey]:
        """The published keys of all full blocks, in order; quick where the prompt's beginning has been seen."""
        return self._key_memo.keys(encoded.runs, root, block_size)

    def keys_in(self, encoded: EncodedPrompt, namespace: Namespace, block_size: int) -> list[PublishedKey]:
        """Likewise, where the prompt may begin with blocks that all tenants share."""
        keys, branch = self.keys(encoded, namespace.root, block_size), namespace.branch
        if branch is None:
            return keys
        private = encoded.behind(branch.blocks * block_size)
        return keys[: branch.blocks] + self.keys(private, branch.root, block_size)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def incremental_decoder(self, *, skip_special_tokens: bool = True) -> IncrementalDecoder:
        return IncrementalDecoder(self.tokenizer, self.special_ids if skip_special_tokens else frozenset())

    @property
    def memo_bytes_used(self) -> int:
        return sum(memo.used_bytes for memo in (self._openings, self._runs, self._open_runs, self._key_memo))

    def check_integrity(self) -> None:
        for memo in (self._openings, self._runs, self._open_runs, self._key_memo):
            memo.check_integrity()

    def golden_prompt_key(self, root: BlockKey, block_size: int) -> str:
        """The last block key of a fixed prompt through template and tokenizer, in hex: two sides that differ anywhere
        between a message and its keys most likely differ here."""
        packed = self._tokenize(self.golden_text(block_size), special_tokens=False)
        return published_keys(root, packed, block_size)[1].hex()

    def golden_text(self, block_size: int) -> str:
        """A conversation, then text for at least one more block, so that all of the conversation is in the keys."""
        filling = _GOLDEN_TEXT * block_size
        if self._template is None:
            return filling
        try:
            return self._template.render(_GOLDEN_MESSAGES, now=_GOLDEN_DATE) + filling
        except PromptError as refusal:
            return refusal.message + filling  # a template that takes no such messages says so on both sides

    def _render(self, prompt: ChatPrompt) -> Rendered:
        if self._template is None:
            raise PromptError("this model has no chat template; send plain text to /v1/completions", "messages")
        return self._template.parts(
            prompt.messages,
            prompt.tools,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            template_kwargs=prompt.template_kwargs,
        )

    def _prepare_text(self, opening: str, rest: str, *, special_tokens: bool) -> PreparedPrompt:
        pieces: list[Run | _NewRun]
        if self._text_runs is None:
            pieces = [self._look_up(("whole" if special_tokens else "run", opening + rest))]
        else:
            pieces = []
            if opening:
                known = self._openings.get(opening) or self._split_opening(opening, self._text_runs)
                pieces = [self._look_up(memo_key) for memo_key in known.runs]
                rest = known.rest + rest
            pieces += map(self._run, self._text_runs.split(rest))
            if special_tokens:
                pieces = [self._text_ends.before, *pieces, self._text_ends.after]
        unseen = sum([len(piece.memo_key[1]) for piece in pieces if type(piece) is _NewRun])
        return PreparedPrompt(pieces, unseen)

    def _split_opening(self, opening: str, text_runs: TextRuns) -> _Opening:
        runs, rest = text_runs.split_opening(opening)
        split = _Opening(tuple(("run", run) for run in runs), rest)
        self._openings.put(opening, split, _RUN_OVERHEAD_BYTES + 2 * sys.getsizeof(opening))
        return split

    def _prepare_ids(self, ids: Sequence[int]) -> PreparedPrompt:
        try:
            packed = pack_tokens(ids)
        except (TypeError, OverflowError) as error:
            raise PromptError("token ids must be non-negative integers", "prompt") from error
        if ids and max(ids) >= self.vocabulary_size:
            message = f"token id {max(ids)} is not in the vocabulary (ids end at {self.vocabulary_size - 1})"
            raise PromptError(message, "prompt")
        pieces: list[Run | _NewRun] = []
        for start in range(0, len(packed), _BYTES_PER_RUN):
            chunk = packed[start : start + _BYTES_PER_RUN]
            pieces.append(self._look_up(("ids", chunk), chunk))
        return PreparedPrompt(pieces, 0)

    def _run(self, text: str) -> Run | _NewRun:
        if len(text) < MIN_RUN_CHARACTERS and self._words is not None:
            # To put it together from words takes no longer than to remember it, which seldom helps: see `_remember`.
            packed = self._words.ids(text)
            if packed is not None:
                return Run(packed, None)
        return self._look_up(("run", text))

    def _look_up(self, memo_key: tuple[str, str | bytes], packed: bytes | None = None) -> Run | _NewRun:
        return self._runs.get(memo_key) or self._open_runs.get(memo_key) or _NewRun(memo_key, packed)

    def _remember(self, new: _NewRun) -> Run:
        if (known := self._runs.get(new.memo_key) or self._open_runs.get(new.memo_key)) is not None:
            return known  # another request was quicker
        assert new.packed is not None, "finish() comes after tokenize_missing()"
        # The open end of a prompt: its next turn makes another run of it, and most questions are asked once.
        is_open = new.memo_key[0] == "run" and len(new.memo_key[1]) < MIN_RUN_CHARACTERS
        run = Run(new.packed, None if is_open else next(self._serials))
        size = _RUN_OVERHEAD_BYTES + sys.getsizeof(new.memo_key[1]) + len(new.packed)
        (self._open_runs if is_open else self._runs).put(new.memo_key, run, size)
        return run

    def _tokenize(self, text: str, *, special_tokens: bool) -> bytes:
        try:
            # Of the tokenizer's ways this one lets go of the interpreter meanwhile: other threads run on.
            [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
            return pack_tokens(encoding.ids)
        except Exception as error:  # lone surrogates, and whatever a normalizer may not like
            raise PromptError(f"the tokenizer does not accept this text: {error}", None) from error


class _TextEnds(NamedTuple):
    """What the post-processor puts around a text, as runs."""

    before: Run
    after: Run


def _load_tokenizer(tokenizer_json: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the bindings raise plain Exception
        raise BundleError(f"tokenizer.json cannot be loaded: {error}") from error
    # Left over from training, and wrong for a prompt.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _text_ends(tokenizer: Tokenizer) -> _TextEnds:
    """Found by example; `_exact_text_runs` notices where it is not as simple as that."""
    inner = tokenizer.encode("a b", add_special_tokens=False).ids
    outer = tokenizer.encode("a b", add_special_tokens=True).ids
    for start in range(len(outer) - len(inner) + 1):
        if outer[start : start + len(inner)] == inner:
            return _TextEnds(Run(pack_tokens(outer[:start]), -1), Run(pack_tokens(outer[start + len(inner) :]), -2))
    return _TextEnds(Run(b"", -1), Run(b"", -2))


def _exact_text_runs(tokenizer: Tokenizer, ends: _TextEnds, words: WordMemo | None) -> TextRuns | None:
    """None where runs encoded one by one do not give the ids of the whole, tried on texts that are hard for it."""
    parts_words = words is not None and words.joins_no_words
    runs = TextRuns(tokenizer, min_run_characters=1, long_run_characters=1, parts_words=parts_words)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    chooser = random.Random(0)
    for _ in range(_PROBES):
        pieces = chooser.choices(_HARD_TEXTS, k=8) + chooser.choices(added or [""], k=6)
        chooser.shuffle(pieces)
        text = "".join(pieces)
        ids = unpack_tokens(ends.before.packed)
        for run in runs.split(text):
            ids += tokenizer.encode(run, add_special_tokens=False).ids
        if ids + unpack_tokens(ends.after.packed) != tokenizer.encode(text, add_special_tokens=True).ids:
            return None
    return TextRuns(tokenizer, parts_words=parts_words)
