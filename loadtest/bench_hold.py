"""How long a server's event loop is held at a time: small requests, one after the other, see it as a wait."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

__all__ = ["longest_wait_seconds"]

_PERIOD_SECONDS = 0.001
_TIMEOUT_SECONDS = 60.0
_REQUEST = b"GET /health HTTP/1.1\r\nHost: bench\r\n\r\n"


def longest_wait_seconds(url: str, over: Callable[[], bool]) -> float:
    """The longest of the waits for `GET /health` until it is `over`. Raises OSError where the server hangs up."""
    address = urlsplit(url)
    longest = 0.0
    with socket.create_connection((address.hostname or "", address.port or 80), _TIMEOUT_SECONDS) as connection:
        while not over():
            begun = time.perf_counter()
            connection.sendall(_REQUEST)
            _read_answer(connection)
            longest = max(longest, time.perf_counter() - begun)
            time.sleep(_PERIOD_SECONDS)
    return longest


def _read_answer(connection: socket.socket) -> None:
    """One with a length."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += _some(connection)
    head, _, body = received.partition(b"\r\n\r\n")
    at = head.lower().find(b"content-length:")
    left = int(head[at + 15 :].split(b"\r\n", 1)[0]) - len(body) if at >= 0 else 0
    while left > 0:
        left -= len(_some(connection))


def _some(connection: socket.socket) -> bytes:
    if not (received := connection.recv(65_536)):
        raise ConnectionResetError("the server hung up")
    return received
