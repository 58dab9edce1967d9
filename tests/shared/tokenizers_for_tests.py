"""Small tokenizers, one for each way in which real ones treat the text around a cut."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

__all__ = ["REGEXES", "SPECIAL_TOKENS", "TOKENIZERS", "byte_level", "splitting_by"]

SPECIAL_TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
REGEXES = {
    "llama 3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "gpt-oss": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll"
    r"|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
_CORPUS = [
    "the quick brown fox jumps over the lazy dog and says hello world to you",
    "user assistant system tool you are a helpful assistant that answers in short sentences",
    "naïve café 東京 это тест 42 1234 don't we'll x = y + 1;\n\n    return None\n",
] * 20


def byte_level(*, add_prefix_space: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def splitting_by(regex: str) -> Tokenizer:
    """As most models since Llama 3."""
    tokenizer = byte_level()
    split = pre_tokenizers.Split(Regex(regex), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _with_bos() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


def _metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", *SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=700, special_tokens=specials, show_progress=False)
    )
    return _without_byte_tokens_as_added(tokenizer)


def _without_byte_tokens_as_added(tokenizer: Tokenizer) -> Tokenizer:
    import json

    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(spec))


def _prepending_normalizer() -> Tokenizer:
    tokenizer = _metaspace("never")
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def _greedy_added_tokens() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(
        [
            AddedToken("<left>", lstrip=True, special=True, normalized=False),
            AddedToken("<right>", rstrip=True, special=True, normalized=False),
            AddedToken("<word>", single_word=True, special=True, normalized=False),
            AddedToken("whole", single_word=True, special=True, normalized=False),
            AddedToken("<|im", special=True, normalized=False),
        ]
    )
    tokenizer.add_tokens([AddedToken("later", normalized=True), AddedToken("Fox", normalized=True, single_word=True)])
    return tokenizer


def _lowercasing() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
    tokenizer.add_tokens([AddedToken("hello", normalized=True)])
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte level with prefix space": lambda: byte_level(add_prefix_space=True),
    "byte level with special tokens around": _with_bos,
    "metaspace before the first word": lambda: _metaspace("first"),
    "metaspace before every piece": lambda: _metaspace("always"),
    "a normalizer that prepends": _prepending_normalizer,
    "greedy added tokens": _greedy_added_tokens,
    "a normalizer that changes letters": _lowercasing,
}
