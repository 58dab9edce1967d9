"""Bytes from a replica to a client, as they come; and how it is said that a replica broke off in the middle."""

from __future__ import annotations

import asyncio
from functools import partial

from aiohttp import web

from router.exchange import Exchange
from router.headers import response_headers
from router.reply import Reply
from router.upstream import UpstreamError, UpstreamResponse
from shared.api import ApiError, dialect_of
from shared.sse import error_frames

__all__ = ["BrokenOffError", "relay"]


_LONGEST_PAUSE_SECONDS = 60.0
"""For the client to take what has been written. Who never reads would otherwise hold its place, and the replica's."""

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

    A chunk goes from one connection to the other in the callback that brings it. This task sleeps meanwhile, and wakes
    up at the end or when the client is slow: then the replica is not read until the client has taken what is there.
    """
    reply = Reply(request, upstream.head, response_headers(upstream.head, exchange.headers()))
    if upstream.complete:
        reply.send_whole(first)
        return reply
    reply.begin(first)
    _note_last_event(exchange, first)
    try:
        upstream.forward(partial(_pass_on, reply, exchange))
        while not await upstream.progress():
            await _drained(reply)
            upstream.resume()
    except UpstreamError as error:
        _end_broken(reply, upstream, exchange, error)
        raise BrokenOffError(reply, error) from error
    reply.end()
    return reply


async def _drained(reply: Reply) -> None:
    """Raises ConnectionError for a client that takes nothing for long, as for one that has left."""
    try:
        async with asyncio.timeout(_LONGEST_PAUSE_SECONDS):
            await reply.drained()
    except TimeoutError:
        reply.abort()
        raise ConnectionResetError("the client does not read its answer") from None


def _pass_on(reply: Reply, exchange: Exchange, chunk: bytes) -> bool:
    _note_last_event(exchange, chunk)
    return reply.pass_on(chunk)


def _note_last_event(exchange: Exchange, chunk: bytes) -> None:
    if chunk.endswith(_LAST_EVENTS):
        # Clients that know the protocol may leave now, before the end of the body: they have their answer.
        exchange.outcome = "ok"


def _end_broken(reply: Reply, upstream: UpstreamResponse, exchange: Exchange, error: UpstreamError) -> None:
    events = (upstream.head.get(b"content-type") or b"").startswith(b"text/event-stream")
    if events and reply.takes_events and upstream.head.get(b"content-encoding") is None:
        failure = _failure(error)
        # The blank line ends an event that was cut short.
        reply.pass_on(b"\n\n" + error_frames(failure, dialect_of(exchange.path), exchange.request_id))
        reply.end()
    else:
        reply.abort()


def _failure(error: UpstreamError) -> ApiError:
    if error.failure == "cut":
        return ApiError(503, "shutting_down", "this router is shutting down: send the request again")
    return ApiError(502, "replica_failed", f"the replica failed while answering: {error}; send the request again")
