"""Request bodies: read once as bytes, unpacked for reading where they are compressed, forwarded as they came."""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import web

from shared.api import ApiError
from shared.api_errors import body_too_large

__all__ = ["read_body", "unpacked"]

_LONGEST_PAUSE_SECONDS = 60.0
"""For the next piece of a body. Who sends half of one and waits would otherwise hold its place for ever."""

_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


async def read_body(request: web.BaseRequest, max_bytes: int) -> bytes:
    """Raises ApiError 413 when it is longer than that, 408 when it does not go on, 400 when it cannot be read."""
    announced = request.content_length
    if announced is not None and announced > max_bytes:
        raise body_too_large(max_bytes)
    expects = request.headers.get("Expect", "").lower() == "100-continue"
    if expects and request.transport is not None and not request.content.at_eof():
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        if request.content.is_eof():  # as nearly always, it came with the head
            return await request.read()
        body = bytearray()
        while piece := await _next_piece(request):
            body += piece
            if len(body) > max_bytes:
                raise body_too_large(max_bytes)
        return bytes(body)
    except web.HTTPRequestEntityTooLarge:
        raise body_too_large(max_bytes) from None
    except TimeoutError:
        pause = f"nothing of the request body came for {_LONGEST_PAUSE_SECONDS:g} s"
        raise ApiError(408, "request_timeout", f"{pause}: send it again") from None
    except web.RequestPayloadError as error:
        raise ApiError(400, "invalid_body", f"the request body cannot be read: {error}") from None


async def _next_piece(request: web.BaseRequest) -> bytes:
    """Empty at the end. Raises TimeoutError."""
    async with asyncio.timeout(_LONGEST_PAUSE_SECONDS):
        return await request.content.readany()


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
