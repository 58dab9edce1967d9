"""All that a router needs to turn a request into the engine's own token ids, as one small, portable value.

The replica publishes its bundle; a router renders and tokenizes with exactly the same bytes.

    packed = b"wrt1" | zlib( msgpack{tokenizer_json, special_tokens, chat_template} )
"""

from __future__ import annotations

import hashlib
import zlib
from functools import cached_property

import msgspec

__all__ = ["BundleError", "TokenizerBundle"]

_MAGIC = b"wrt1"
_MAX_UNPACKED_BYTES = 256 * 2**20


class BundleError(ValueError):
    """These bytes are not a tokenizer bundle; the message says why."""


class TokenizerBundle(msgspec.Struct, frozen=True, dict=True):
    """`tokenizer_json` is the file of that name; `special_tokens` are the names a chat template may use
    (`bos_token`, `eos_token`, ...); `chat_template` is Jinja source, or None where the model has none."""

    tokenizer_json: bytes
    special_tokens: dict[str, str]
    chat_template: str | None = None

    @cached_property
    def digest(self) -> str:
        """32 hex digits over all of it: bundles with equal digests make equal prompts."""
        special_tokens = msgspec.json.encode(self.special_tokens, order="sorted")
        return _digest(self.tokenizer_json, special_tokens, _template_bytes(self.chat_template))

    @cached_property
    def template_digest(self) -> str:
        return _digest(_template_bytes(self.chat_template))

    def pack(self) -> bytes:
        return _MAGIC + zlib.compress(msgspec.msgpack.encode(self), 6)

    @classmethod
    def unpack(cls, packed: bytes) -> TokenizerBundle:
        """The inverse of `pack`. Raises BundleError for anything else, and never unpacks more than 256 MiB."""
        if not packed.startswith(_MAGIC):
            raise BundleError("not a tokenizer bundle (unknown format)")
        unpacker = zlib.decompressobj()
        try:
            unpacked = unpacker.decompress(packed[len(_MAGIC) :], _MAX_UNPACKED_BYTES)
        except zlib.error as error:
            raise BundleError(f"damaged tokenizer bundle: {error}") from error
        if not unpacker.eof:
            raise BundleError("tokenizer bundle is truncated, or larger than 256 MiB unpacked")
        try:
            return msgspec.msgpack.decode(unpacked, type=cls)
        except msgspec.MsgspecError as error:
            raise BundleError(f"damaged tokenizer bundle: {error}") from error


def _template_bytes(template: str | None) -> bytes:
    # A model without a template is not one with an empty template.
    return b"\x00" if template is None else b"\x01" + template.encode()


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
