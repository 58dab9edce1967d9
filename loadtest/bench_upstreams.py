"""Replicas for the router's bench that answer at once: real members of the fleet in front of no engine at all.

    python -m loadtest.bench_upstreams REDIS_URL COUNT        prints `ready <url> <url> ...`

Each publishes what a replica would: its record, its lease, the blocks of its share of the system prompts, and for every
request new blocks and evicted ones. A stream is 64 chunks, `CHUNK_SECONDS` apart, so that none is read together with
the next. Other routers' probes are answered too.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import deque
from functools import partial
from typing import cast

import msgspec
import uvloop

from loadtest.bench_prompts import MODEL, system_prompts
from replica.cache_events import CacheEvents
from replica.publisher import Publisher
from replica.tiny_tokenizer import tiny_bundle
from shared.blocks import BlockKey, block_keys, golden_key, namespace_root
from shared.fleet_state import CostCoefficients, FleetState, ReplicaLoad, ReplicaRecord
from shared.prompts import ChatPrompt, PromptEncoder
from shared.supervisor import die_with_parent

__all__ = ["CHUNKS"]

CHUNKS = 64
CHUNK_SECONDS = 0.01
_BLOCK_SIZE = 16
_BLOCKS_PER_REQUEST = 6
_TAIL_BLOCKS = 4096
_FINGERPRINT = "bench"
_ANSWER = b'{"id":"chatcmpl-1","object":"chat.completion","model":"tiny","choices":[{"index":0,"message":{"role":"assistant","content":"Done."},"finish_reason":"stop"}],"usage":{"prompt_tokens":1000,"completion_tokens":2,"total_tokens":1002}}'  # noqa: E501
_CHUNK = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","model":"tiny","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'  # noqa: E501
_LAST = b"data: [DONE]\n\n"


def _document(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def _framed(chunk: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(chunk), chunk)


_WHOLE = _document(_ANSWER)
_MODELS = _document(b'{"object":"list","data":[{"id":"tiny","object":"model"}]}')
# What the routers of SGLang and vLLM ask before they send anything.
_PROBED = _document(
    b'{"model_path":"tiny","served_model_name":"tiny","status":"ok","version":"0","is_generation":true}'
)
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_STREAM_CHUNK = _framed(_CHUNK)
_STREAM_END = _framed(_LAST) + b"0\r\n\r\n"


class _Member:
    """One replica as Redis shows it."""

    def __init__(self, fleet_state: FleetState, number: int, url: str, packed: bytes, record: ReplicaRecord) -> None:
        self._record = msgspec.structs.replace(record, id=f"bench-{number}", url=url)
        self.publisher = Publisher(fleet_state, lambda: self._record, packed)
        self._tails: deque[BlockKey] = deque()

    def store(self, keys: list[BlockKey]) -> None:
        self.publisher.offer(CacheEvents(keys, []))

    def served(self) -> None:
        """A request has left blocks of its own; the oldest ones make room."""
        stored = [BlockKey(os.urandom(16)) for _ in range(_BLOCKS_PER_REQUEST)]
        self._tails.extend(stored)
        gone = []
        while len(self._tails) > _TAIL_BLOCKS:
            gone.append(self._tails.popleft())
        self.publisher.offer(CacheEvents(stored, gone))


class _Connection(asyncio.Protocol):
    def __init__(self, member: _Member) -> None:
        self._member = member
        self._loop = asyncio.get_running_loop()
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        received = self._received = self._received + data if self._received else data
        head_end = received.find(b"\r\n\r\n")
        if head_end < 0:
            return
        length = 0
        for line in received[:head_end].split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                length = int(line[15:])
        if len(received) < head_end + 4 + length:
            return
        self._received = b""
        if received.startswith(b"POST /v1/"):
            self._member.served()
            if b'"stream":true' in received:
                self._transport.write(_STREAM_HEAD)
                self._stream(CHUNKS - 1)
            else:
                self._transport.write(_WHOLE)
        else:
            self._transport.write(_MODELS if received.startswith(b"GET /v1/models") else _PROBED)

    def _stream(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if not left:
            self._transport.write(_STREAM_END)
            return
        self._transport.write(_STREAM_CHUNK)
        self._loop.call_later(CHUNK_SECONDS, self._stream, left - 1)


async def _serve(redis_url: str, count: int) -> None:
    bundle = tiny_bundle()
    encoder, packed = PromptEncoder(bundle), bundle.pack()
    root = namespace_root(_FINGERPRINT)
    record = ReplicaRecord(
        id="any",
        url="http://any",
        model=MODEL,
        fingerprint=_FINGERPRINT,
        golden_key=golden_key(root, _BLOCK_SIZE),
        golden_prompt_key=encoder.golden_prompt_key(root, _BLOCK_SIZE),
        tokenizer=bundle.digest,
        block_size=_BLOCK_SIZE,
        context_tokens=131_072,
        capacity_blocks=65_536,
        load=ReplicaLoad(free_blocks=32_768, evictable_blocks=32_768),
        cost=CostCoefficients(0.001, 1e-5, 1e-9),
        replica_class="bench",
    )
    loop, fleet_state = asyncio.get_running_loop(), FleetState(redis_url)
    members, urls = [], []
    for number in range(count):
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        urls.append(f"http://127.0.0.1:{listening.getsockname()[1]}")
        member = _Member(fleet_state, number, urls[-1], packed, record)
        await loop.create_server(partial(_Connection, member), sock=listening)
        members.append(member)
    for number, text in enumerate(system_prompts()):
        prompt = ChatPrompt([{"role": "system", "content": text}], add_generation_prompt=False)
        members[number % count].store(block_keys(root, encoder.encode(prompt).token_ids, _BLOCK_SIZE))
    for member in members:
        member.publisher.start()
    sys.stdout.write(f"ready {' '.join(urls)}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    die_with_parent()
    uvloop.run(_serve(sys.argv[1], int(sys.argv[2])))
