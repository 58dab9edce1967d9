"""Request bodies as text: unpacked for reading where they are compressed; they are forwarded as they came."""

from __future__ import annotations

import zlib

from shared.api import ApiError
from shared.api_errors import body_too_large

__all__ = ["unpacked"]

_WINDOW_BITS = {b"gzip": 16 + zlib.MAX_WBITS, b"x-gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
_MOST_MEMBERS = 64
"""Of gzip, one after the other: each costs a copy of what follows it."""


def unpacked(body: bytes, encoding: bytes | None, max_bytes: int) -> bytes:
    """The body as text. Raises ApiError 415 for an encoding not known here, 413 for one that unpacks to too much."""
    if not encoding or encoding.lower() == b"identity":
        return body
    window = _WINDOW_BITS.get(encoding.lower())
    if window is None:
        raise ApiError(
            415,
            "unsupported_encoding",
            f"Content-Encoding {encoding[:50].decode(errors='replace')!r} is not supported: send gzip, deflate or none",
        )
    text, rest = b"", body
    try:
        for _ in range(_MOST_MEMBERS):
            unpacker = zlib.decompressobj(window)
            text += unpacker.decompress(rest, max_bytes + 1 - len(text))
            if len(text) > max_bytes:
                raise body_too_large(max_bytes)
            if not unpacker.eof:
                raise zlib.error("it ends early")
            rest = unpacker.unused_data
            if not rest:
                return text
            if window == zlib.MAX_WBITS:
                raise zlib.error("it goes on behind its end")
    except zlib.error as error:
        raise ApiError(400, "invalid_body", f"the body is not valid {encoding.decode()}: {error}") from None
    raise ApiError(400, "invalid_body", f"the body has more than {_MOST_MEMBERS} gzip members: send one")
