"""A client that does not keep to HTTP, and reads what it is told."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any
from urllib.parse import urlsplit

__all__ = ["BROKEN_HTTP", "answer_to", "reset"]

BROKEN_HTTP = (
    b"hello?\r\n\r\n",
    b"GET / HTTP/1.1\r\nno colon here\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 20_000 + b"\r\n\r\n",
)


def reset(writer: asyncio.StreamWriter) -> None:
    """End the connection at once, by a reset."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def answer_to(url: str, sent: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers (names in lower case) and JSON body of the answer, after which the server hangs up."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers, json.loads(body)
