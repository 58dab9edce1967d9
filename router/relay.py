"""Bytes from a replica to a client, as they come; and how it is said that a replica broke off in the middle."""

from __future__ import annotations

from functools import partial

from router.client_request import ClientRequest
from router.exchange import Exchange, router_shutting_down
from router.headers import response_headers
from router.reply import Reply
from router.upstream import UpstreamError, UpstreamResponse
from shared.api import ApiError, dialect_of
from shared.sse import error_frames

__all__ = ["BrokenOffError", "relay"]

_LAST_EVENTS = (b"data: [DONE]\n\n", b'{"type":"message_stop"}\n\n')


class BrokenOffError(Exception):
    """The replica broke off after the first byte. The client has been told as far as its protocol allows."""

    def __init__(self, error: UpstreamError) -> None:
        super().__init__(str(error))
        self.error = error


async def relay(request: ClientRequest, upstream: UpstreamResponse, first: bytes, exchange: Exchange) -> None:
    """Answer with the replica's status, headers and body; `first` has been read already. Raises BrokenOffError.

    A chunk goes from one connection to the other in the callback that brings it. This task sleeps meanwhile, and wakes
    up at the end or when the client is slow: then the replica is not read until the client has taken what is there.
    """
    reply = Reply(request, upstream.head, response_headers(upstream.head, exchange.headers()))
    if upstream.complete:
        reply.send_whole(first)
        return
    reply.begin(first)
    _note_events(exchange, first)
    try:
        upstream.forward(partial(_pass_on, reply, exchange))
        while not await upstream.progress():
            await request.connection.drained()
            upstream.resume()
    except UpstreamError as error:
        _end_broken(reply, upstream, exchange, error)
        raise BrokenOffError(error) from error
    reply.end()


def _pass_on(reply: Reply, exchange: Exchange, chunk: bytes) -> bool:
    _note_events(exchange, chunk)
    return reply.pass_on(chunk)


def _note_events(exchange: Exchange, chunk: bytes) -> None:
    if exchange.streamed:  # a blank line ends each, written one way or the other
        exchange.events += chunk.count(b"\n\n") or chunk.count(b"\n\r\n")
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
        return router_shutting_down()
    return ApiError(502, "replica_failed", f"the replica failed while answering: {error}; send the request again")
