"""A token's own bytes, which may be half a character: what log probabilities are told of.

byte-level      "Ġtea"  -> b" tea"      every character of the vocabulary stands for a byte
byte fallback   "<0xE2>" -> b"\\xe2"     "▁tea" -> b" tea"
"""

from __future__ import annotations

import re

from tokenizers import Tokenizer

__all__ = ["TokenBytes"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {index: token.content for index, token in tokenizer.get_added_tokens_decoder().items()}
        decoder = tokenizer.decoder
        self._byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
        self._byte_of = _byte_level_alphabet()

    def __call__(self, token_id: int) -> bytes:
        """Empty for an id that the tokenizer does not know."""
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return b"".join([self._byte_of.get(character) or character.encode() for character in token])
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes([int(byte[1], 16)])
        return token.replace("▁", " ").encode()


def _byte_level_alphabet() -> dict[str, bytes]:
    """Printable Latin-1 bytes are themselves; the others stand, in order, from U+0100 on (as GPT-2 defined it)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(0x100 + place): bytes([byte]) for place, byte in enumerate(others)}
