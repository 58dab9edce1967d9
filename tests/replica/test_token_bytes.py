"""A token's bytes, against what the tokenizer says of the text they are part of."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models

from replica.tiny_tokenizer import SPECIAL_TOKENS, tiny_bundle
from replica.token_bytes import TokenBytes

HARD = "naïve café, 東京 🙂\n\n  price: 5 €\t<|x|> ▁ \u00a0"


def test_byte_level_tokens_spell_the_text_they_came_from_whole_or_in_halves() -> None:
    tokenizer = Tokenizer.from_buffer(tiny_bundle().tokenizer_json)
    bytes_of = TokenBytes(tokenizer)
    ids = tokenizer.encode(HARD, add_special_tokens=False).ids
    assert b"".join(map(bytes_of, ids)) == HARD.encode()
    assert any(len(bytes_of(token)) == 1 and bytes_of(token)[0] > 127 for token in ids)


def test_every_byte_has_a_token_and_a_special_token_is_spelled_as_it_is() -> None:
    tokenizer = Tokenizer.from_buffer(tiny_bundle().tokenizer_json)
    bytes_of = TokenBytes(tokenizer)
    spelled = {bytes_of(token) for token in range(tokenizer.get_vocab_size())}
    assert {bytes([byte]) for byte in range(256)} <= spelled
    assert bytes_of(SPECIAL_TOKENS.index(SPECIAL_TOKENS[0])) == SPECIAL_TOKENS[0].encode()
    assert bytes_of(10**9) == b""


@pytest.mark.parametrize(("token", "expected"), [("▁tea", b" tea"), ("tea", b"tea"), ("<0xE2>", b"\xe2")])
def test_byte_fallback_tokens_are_bytes_and_spaces(token: str, expected: bytes) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={token: 0}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert TokenBytes(tokenizer)(0) == expected
