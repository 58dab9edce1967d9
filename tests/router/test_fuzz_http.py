"""Requests with bytes changed, left out, put in and cut off: each is answered or refused, and nothing else comes of it.

What reaches the replica is exactly what was answered by it: no byte is read as one request here and as two there.
"""

from __future__ import annotations

import asyncio
import json
import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.router.conftest import Bench, BenchFactory, chat
from tests.router.fake_replica import refuse

BODY = json.dumps(chat(False)).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Own: a b\r\n"
BY_LENGTH = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
BY_CHUNKS = HEAD + b"Transfer-Encoding: chunked\r\n\r\n5;a=b\r\n%b\r\n%x\r\n%b\r\n0\r\nX-T: 1\r\n\r\n" % (
    BODY[:5],
    len(BODY) - 5,
    BODY[5:],
)
PASSED = b"GET /v1/other?a=%2F HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n"
OLD = b"GET /v1/other HTTP/1.0\r\n\r\n"
PIECES = st.sampled_from(
    [bytes([byte]) for byte in b"\r\n\0\t :;,/%#?+-09aZ\x7f\x80\xff"]
    + [b"\r\n", b"\n\n", b"\r\n\r\n", b"\r\n ", b"0\r\n\r\n", b"HTTP/1.1", b"HTTP/1.0", b"GET / HTTP/1.1\r\n"]
    + [b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n", b"Host: y\r\n"]
    + [b"Connection: close\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"x" * 20_000, BY_LENGTH, PASSED]
)
STATUS = re.compile(rb"HTTP/1\.1 ([1-9][0-9]{2}) ")


@st.composite
def conversations(draw: st.DrawFn) -> bytes:
    sent = b"".join(draw(st.lists(st.sampled_from((BY_LENGTH, BY_CHUNKS, PASSED, OLD)), min_size=1, max_size=3)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(sent)))
        taken = draw(st.sampled_from((0, 0, 1, 2, 20)))
        sent = sent[:at] + draw(st.just(b"") | PIECES) + sent[at + taken :]
    return sent[: draw(st.integers(0, len(sent)))] if draw(st.integers(0, 4)) == 0 else sent


async def test_whatever_is_sent_is_answered_or_refused_and_goes_no_further(bench: BenchFactory) -> None:
    b = await bench(1)
    b.replicas[0].behave = refuse(203)  # nothing else here answers so
    examples: list[bytes] = []

    @settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(conversations())
    def collect(example: bytes) -> None:
        examples.append(example)

    collect()
    for sent in examples:
        before = b.seen
        statuses = await answers(b, sent)
        assert all(status < 500 for status in statuses), (sent, statuses)
        assert statuses.count(203) == b.seen - before, (sent, statuses)
        for seen in b.replicas[0].seen[before:]:
            assert (seen.method, seen.path.partition("?")[0][:4]) != ("", "/v1/"), sent
            assert len(seen.headers.getall("Host")) == 1
            assert len(seen.headers.getall("x-request-id")) == 1
    await b.settled()
    async with b.client.post(b.url, json=chat(False)) as response:
        assert response.status == 203


async def answers(b: Bench, sent: bytes) -> list[int]:
    """The statuses of all that comes back, after which the router hangs up."""
    host, port = b.router.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        writer.write_eof()
        said = await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.transport.abort()
    statuses = [int(status) for status in STATUS.findall(said)]
    assert bool(statuses) is bool(said), (sent, said)
    return [status for status in statuses if status != 100]
