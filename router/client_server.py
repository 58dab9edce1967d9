"""The router's one server: listens, keeps the clients' connections, and watches their deadlines.

TCP   accepted ------------------> ClientConnection
TLS   accepted ----> handshake --> ClientConnection     counted from here on: a handshake takes a place, and has a
                         |                              time limit of its own
                         `-------> hung up, and a line in the log
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl

from router.client_connection import MOST_REFUSED, ClientConnection, ClientLimits
from router.client_request import Handler
from shared.telemetry import fields

__all__ = ["ClientServer"]

_SWEEP_SECONDS = 0.25
_BACKLOG = 2048
_ACCEPT_PAUSE_SECONDS = 0.5
"""After a connection that could not be accepted: there are no more file descriptors."""

_logger = logging.getLogger(__name__)


class ClientServer:
    """`handle` answers every request."""

    def __init__(self, handle: Handler, limits: ClientLimits) -> None:
        self._handle = handle
        self._limits = limits
        self._connections: set[ClientConnection] = set()
        self._loop: asyncio.AbstractEventLoop
        self._server: asyncio.Server | None = None
        self._listener: socket.socket | None = None
        """Where TLS is spoken, in place of the server."""
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self._sweep: asyncio.TimerHandle

    async def listen(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, *, shared_port: bool = False
    ) -> int:
        """The port. Raises OSError when the address cannot be bound; others may bind it too where it is shared."""
        self._loop = asyncio.get_running_loop()
        self._sweep = self._loop.call_later(_SWEEP_SECONDS, self._look_at_deadlines)
        if tls is None:
            self._server = await self._loop.create_server(
                self._connection, host, port, backlog=_BACKLOG, reuse_port=shared_port or None
            )
            return int(self._server.sockets[0].getsockname()[1])
        self._listener = listener = _listening(host, port, shared_port)
        self._accepting = self._loop.create_task(self._accept(listener, tls))
        return int(listener.getsockname()[1])

    async def close(self, grace_seconds: float) -> None:
        """No new connections; what is being answered ends within the grace or is cut off."""
        if self._server is not None:
            self._server.close()
        if self._accepting is not None and self._listener is not None:
            await _cancelled({self._accepting, *self._handshakes})
            self._listener.close()
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

    async def _accept(self, listener: socket.socket, tls: ssl.SSLContext) -> None:
        """Beyond the limit a few are let in, to be told so; more are hung up on."""
        most = self._limits.max_connections + MOST_REFUSED
        while True:
            try:
                accepted, _ = await self._loop.sock_accept(listener)
            except OSError as error:
                _logger.error("no connection can be accepted", extra=fields(reason=error.strerror))
                await asyncio.sleep(_ACCEPT_PAUSE_SECONDS)
                continue
            if len(self._connections) + len(self._handshakes) >= most:
                accepted.close()
                continue
            handshake = self._loop.create_task(self._shake_hands(accepted, tls))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, accepted: socket.socket, tls: ssl.SSLContext) -> None:
        try:
            peer = str(accepted.getpeername()[0])
            await self._loop.connect_accepted_socket(
                self._connection, accepted, ssl=tls, ssl_handshake_timeout=self._limits.handshake_timeout_seconds
            )
        except OSError as error:  # those of TLS are such too
            accepted.close()
            reason = getattr(error, "reason", None) or error.strerror or str(error)
            _logger.info("a TLS handshake failed", extra=fields(peer=peer, reason=reason))

    def _look_at_deadlines(self) -> None:
        self._sweep = self._loop.call_later(_SWEEP_SECONDS, self._look_at_deadlines)  # first: no fault below may end it
        now = self._loop.time()
        for connection in [connection for connection in self._connections if connection.deadline <= now]:
            connection.expire()


def _listening(host: str, port: int, shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=shared)
    listener.setblocking(False)
    return listener


async def _cancelled(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
