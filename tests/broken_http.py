"""A client that does not keep to HTTP, and reads what it is told."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any
from urllib.parse import urlsplit

__all__ = ["AMBIGUOUS_REQUESTS", "BROKEN_HTTP", "answer_to", "reset"]

BROKEN_HTTP = (
    b"hello?\r\n\r\n",
    b"GET / HTTP/1.1\r\nno colon here\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n",
)


_POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
_GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n"

AMBIGUOUS_REQUESTS = (
    _POST + b"Content-Length: 6\r\n" + _CHUNKED + b"\r\n0\r\n\r\nG",
    _POST + _CHUNKED + b"Content-Length: 4\r\n\r\n1\r\na\r\n0\r\n\r\n",
    _POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    _POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    _POST + b"Content-Length: 3, 3\r\n\r\nabc",
    _POST + b"Content-Length: +3\r\n\r\nabc",
    _POST + b"Content-Length: -3\r\n\r\nabc",
    _POST + b"Content-Length: 0x3\r\n\r\nabc",
    _POST + b"Content-Length: 3 3\r\n\r\nabc",
    _POST + b"Content-Length: \r\n\r\n",
    _POST + b"Content-Length: 99999999999999999999\r\n\r\nabc",
    _POST + b"Content-Length : 3\r\n\r\nabc",
    _POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    _POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    _POST + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    _POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    _POST + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    _POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    _POST + b"Transfer-Encoding: chun\r\n ked\r\n\r\n0\r\n\r\n",
    _POST + b"X: 1\r\n " + _CHUNKED + b"\r\n0\r\n\r\n",
    _POST + _CHUNKED + _CHUNKED + b"\r\n0\r\n\r\n",
    _GET + b"Host: y\r\n\r\n",
    _GET + b" folded: 1\r\n\r\n",
    _GET + b"A: 1\r\n\tfolded\r\n\r\n",
    _GET + b"A: 1\nB: 2\r\n\r\n",
    _GET + b"A: 1\rB: 2\r\n\r\n",
    _GET + b"A: \x00\r\n\r\n",
    _GET + b"A: \x1b\r\n\r\n",
    _GET + b": 1\r\n\r\n",
    _GET + b"A\xe9: 1\r\n\r\n",
    _GET + b"A B: 1\r\n\r\n",
    _GET + b"no colon\r\n\r\n",
    b"GET / HTTP/1.1\nHost: x\n\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\xe9 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET relative HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.2\r\nHost: x\r\n\r\n",
    b"GET / http/1.1\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)
"""What two readers could take for two things. Whoever speaks HTTP answers 400, and reads nothing behind it."""


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
