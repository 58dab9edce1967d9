"""The router's one server: listens, keeps the clients' connections, and watches their deadlines."""

from __future__ import annotations

import asyncio
import ssl

from router.client_connection import ClientConnection, ClientLimits
from router.client_request import Handler

__all__ = ["ClientServer"]

_SWEEP_SECONDS = 0.25
_BACKLOG = 2048


class ClientServer:
    """`handle` answers every request."""

    def __init__(self, handle: Handler, limits: ClientLimits) -> None:
        self._handle = handle
        self._limits = limits
        self._connections: set[ClientConnection] = set()
        self._loop: asyncio.AbstractEventLoop
        self._server: asyncio.Server
        self._sweep: asyncio.TimerHandle

    async def listen(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, *, shared_port: bool = False
    ) -> int:
        """The port. Raises OSError when the address cannot be bound; others may bind it too where it is shared."""
        self._loop = asyncio.get_running_loop()
        handshake_seconds = self._limits.head_timeout_seconds if tls is not None else None
        self._server = await self._loop.create_server(
            self._connection,
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=handshake_seconds,
            backlog=_BACKLOG,
            reuse_port=shared_port or None,
        )
        self._sweep = self._loop.call_later(_SWEEP_SECONDS, self._look_at_deadlines)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self, grace_seconds: float) -> None:
        """No new connections; what is being answered ends within the grace or is cut off."""
        self._server.close()
        for connection in list(self._connections):
            if connection.task is None:
                connection.close()
        if tasks := [connection.task for connection in self._connections if connection.task is not None]:
            await asyncio.wait(tasks, timeout=grace_seconds)
        self._sweep.cancel()
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)  # until they have heard of it

    def _connection(self) -> ClientConnection:
        return ClientConnection(self._loop, self._handle, self._limits, self._connections)

    def _look_at_deadlines(self) -> None:
        now = self._loop.time()
        for connection in [connection for connection in self._connections if connection.deadline <= now]:
            connection.expire()
        self._sweep = self._loop.call_later(_SWEEP_SECONDS, self._look_at_deadlines)
