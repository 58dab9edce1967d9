"""Bytes from a replica to a client, as they come; and how it is said that a replica broke off in the middle."""

from __future__ import annotations

from contextlib import suppress

from aiohttp import web

from router.exchange import Exchange
from router.headers import response_headers
from router.upstream import UpstreamError, UpstreamResponse
from shared.api import ApiError, dialect_of
from shared.sse import error_frames

__all__ = ["BrokenOffError", "relay"]


_LAST_EVENTS = (b"data: [DONE]\n\n", b'{"type":"message_stop"}\n\n')


class BrokenOffError(Exception):
    """The replica broke off after the first byte. The client has been told as far as its protocol allows."""

    def __init__(self, response: web.StreamResponse, error: UpstreamError) -> None:
        super().__init__(str(error))
        self.response = response
        self.error = error


async def relay(
    request: web.BaseRequest, upstream: UpstreamResponse, first: bytes, exchange: Exchange
) -> web.StreamResponse:
    """Answer with the replica's status, headers and body; `first` has been read already. Raises BrokenOffError.

    Backpressure is the client's: the next chunk is read once this one has been taken.
    """
    headers = response_headers(upstream.headers, exchange.headers())
    if upstream.complete:
        whole = web.Response(status=upstream.status, headers=headers, body=first)
        await whole.prepare(request)
        await whole.write_eof()
        return whole
    response = web.StreamResponse(status=upstream.status, headers=headers)
    await response.prepare(request)
    chunk = first
    try:
        while chunk:
            await response.write(chunk)
            if chunk.endswith(_LAST_EVENTS):
                # Clients that know the protocol may leave now, before the end of the body: they have their answer.
                exchange.outcome = "ok"
            chunk = await upstream.read()
    except UpstreamError as error:
        await _end_broken(request, response, upstream, exchange, error)
        raise BrokenOffError(response, error) from error
    with suppress(ConnectionError):
        await response.write_eof()
    return response


async def _end_broken(
    request: web.BaseRequest,
    response: web.StreamResponse,
    upstream: UpstreamResponse,
    exchange: Exchange,
    error: UpstreamError,
) -> None:
    events = upstream.headers.get("Content-Type", "").startswith("text/event-stream")
    if events and "Content-Length" not in response.headers and "Content-Encoding" not in response.headers:
        failure = _failure(error)
        # The blank line ends an event that was cut short.
        await response.write(b"\n\n" + error_frames(failure, dialect_of(exchange.path), exchange.request_id))
        await response.write_eof()
    elif request.transport is not None:
        # A truncated body must not look complete.
        request.transport.abort()


def _failure(error: UpstreamError) -> ApiError:
    if error.failure == "cut":
        return ApiError(503, "shutting_down", "this router is shutting down: send the request again")
    return ApiError(502, "replica_failed", f"the replica failed while answering: {error}; send the request again")
