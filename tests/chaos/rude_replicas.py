"""Replicas that are well when they are probed and break off requests in every state. Each serves a model of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal, NamedTuple

from tests.broken_http import reset

__all__ = ["RUDE", "rude_replicas"]

Ending = Literal["reset", "hang up", "stay"]

_OK = b"HTTP/1.1 200 OK\r\n"
_STREAM = _OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_JSON = _OK + b"Content-Type: application/json\r\n"
_EVENT = b'14\r\ndata: {"chunk": 0}\n\n\r\n'


class Rudeness(NamedTuple):
    said: bytes
    ending: Ending
    told: str
    """What its client must meet: a status, `told` in the stream, `cut`, or `whole`."""


RUDE = {
    "reset-before-answering": Rudeness(b"", "reset", "502"),
    "hung-up-before-answering": Rudeness(b"", "hang up", "502"),
    "silent": Rudeness(b"", "stay", "504"),
    "garbage": Rudeness(b"\x00\xff\x16\x03 garbage\r\n\r\n", "hang up", "502"),
    "another-protocol": Rudeness(b"SSH-2.0-OpenSSH_9.6\r\n", "stay", "504"),
    "half-a-head": Rudeness(_OK + b"Content-Ty", "hang up", "502"),
    "half-a-head-and-silent": Rudeness(_OK + b"Content-Ty", "stay", "504"),
    "a-head-without-end": Rudeness(_OK + b"X: " + b"x" * 100_000, "stay", "502"),
    "for-ever-about-to-answer": Rudeness(b"HTTP/1.1 102 Processing\r\n\r\n" * 9, "stay", "504"),
    "switching-protocols": Rudeness(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", "stay", "502"),
    "two-lengths": Rudeness(_JSON + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", "stay", "502"),
    "a-head-and-a-reset": Rudeness(_STREAM, "reset", "502"),
    "a-head-and-silence": Rudeness(_STREAM, "stay", "504"),
    "length-too-long": Rudeness(_JSON + b'Content-Length: 99\r\n\r\n{"a": 1', "hang up", "cut"),
    "length-too-long-and-silent": Rudeness(_JSON + b'Content-Length: 99\r\n\r\n{"a": 1', "stay", "cut"),
    "length-too-short": Rudeness(_JSON + b'Content-Length: 8\r\n\r\n{"a": 1}{"b": 2}', "stay", "whole"),
    "a-second-answer": Rudeness((_JSON + b'Content-Length: 8\r\n\r\n{"a": 1}') * 2, "stay", "whole"),
    "a-chunk-without-size": Rudeness(_STREAM + _EVENT + b"zz\r\n", "stay", "502"),
    "a-chunk-longer-than-its-size": Rudeness(_STREAM + b"2\r\ndata: {}\r\n", "stay", "502"),
    "reset-in-the-stream": Rudeness(_STREAM + _EVENT, "reset", "told"),
    "hung-up-in-the-stream": Rudeness(_STREAM + _EVENT, "hang up", "told"),
    "silent-in-the-stream": Rudeness(_STREAM + _EVENT, "stay", "told"),
    "half-an-event": Rudeness(_STREAM + b"ff\r\ndata: {", "hang up", "told"),
}
"""By the model that each serves."""


class _RudeReplica:
    def __init__(self, name: str, rudeness: Rudeness) -> None:
        self._name = name
        self._rudeness = rudeness

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, and the end of the connection."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                models = json.dumps({"data": [{"id": self._name}]}).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(models) + models
                )
                return
            writer.write(self._rudeness.said)
            await writer.drain()
            if self._rudeness.ending == "reset":
                reset(writer)
            elif self._rudeness.ending == "stay":
                await reader.read()  # its body, and then until the router has had enough
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def rude_replicas() -> AsyncIterator[dict[str, str]]:
    """Their URLs, by the model that each serves."""
    async with AsyncExitStack() as stack:
        urls = {}
        for name, rudeness in RUDE.items():
            server = await asyncio.start_server(_RudeReplica(name, rudeness).serve, "127.0.0.1", 0)
            await stack.enter_async_context(server)
            urls[name] = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield urls
