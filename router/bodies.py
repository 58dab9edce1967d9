"""Request bodies: read once as bytes, unpacked for reading where they are compressed, forwarded as they came."""

from __future__ import annotations

import zlib

from aiohttp import web

from shared.api import ApiError
from shared.api_errors import body_too_large

__all__ = ["read_body", "unpacked"]

_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


async def read_body(request: web.BaseRequest, max_bytes: int) -> bytes:
    """Raises ApiError 413 when it is longer than that, 400 when it cannot be read."""
    announced = request.content_length
    if announced is not None and announced > max_bytes:
        raise body_too_large(max_bytes)
    expects = request.headers.get("Expect", "").lower() == "100-continue"
    if expects and request.transport is not None and not request.content.at_eof():
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise body_too_large(max_bytes) from None
    except web.RequestPayloadError as error:
        raise ApiError(400, "invalid_body", f"the request body cannot be read: {error}") from None


def unpacked(body: bytes, encoding: str | None, max_bytes: int) -> bytes:
    """The body as text. Raises ApiError 415 for an encoding not known here, 413 for one that unpacks to too much."""
    if not encoding or encoding.lower() == "identity":
        return body
    window = _WINDOW_BITS.get(encoding.lower())
    if window is None:
        raise ApiError(
            415,
            "unsupported_encoding",
            f"Content-Encoding {encoding[:50]!r} is not supported: send gzip, deflate or none",
        )
    unpacker = zlib.decompressobj(window)
    try:
        text = unpacker.decompress(body, max_bytes)
    except zlib.error as error:
        raise ApiError(400, "invalid_body", f"the body is not valid {encoding}: {error}") from None
    if unpacker.unconsumed_tail:
        raise body_too_large(max_bytes)
    return text
