"""A connection between its making and its first request."""

from __future__ import annotations

import asyncio

import pytest

from router.upstream_connection import Connection, ConnectionPool, UpstreamError, UpstreamResponse


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True


async def test_one_that_was_just_made_is_not_swept_away_and_one_that_is_gone_is_told() -> None:
    loop, pool, transport = asyncio.get_running_loop(), ConnectionPool(), _Transport()
    connection = Connection(loop, pool)
    connection.connection_made(transport)
    pool.expire(loop.time(), idle_since=loop.time())
    assert connection.usable

    transport.abort()
    with pytest.raises(UpstreamError, match="hung up"):
        connection.send(UpstreamResponse(connection, "GET", 1.0, 1.0, 1.0), b"", b"")
