"""Request bodies as text: unpacked for reading where they are compressed; they are forwarded as they came."""

from __future__ import annotations

import zlib

from shared.api import ApiError
from shared.api_errors import body_too_large

__all__ = ["unpacked"]

_WINDOW_BITS = {b"gzip": 16 + zlib.MAX_WBITS, b"x-gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}


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
    unpacker = zlib.decompressobj(window)
    try:
        text = unpacker.decompress(body, max_bytes)
    except zlib.error as error:
        raise ApiError(400, "invalid_body", f"the body is not valid {encoding.decode()}: {error}") from None
    if unpacker.unconsumed_tail:
        raise body_too_large(max_bytes)
    return text
