"""What the router sends on is read by the replica's HTTP server exactly as the router read it: nothing hides in it."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from random import Random

import pytest
from multidict import CIMultiDict

from tests.router.conftest import Bench, BenchFactory, chat
from tests.router.fake_replica import Seen, refuse

PATH = "/v1/chat/completions"
BODY = json.dumps(chat(False)).encode()
HIDDEN = b"GET /v1/hidden HTTP/1.1\r\nHost: x\r\n\r\n"

BODIES = {
    "plain": BODY,
    "a request behind it": BODY + b"\r\n\r\n" + HIDDEN,
    "a last chunk and a request": b"0\r\n\r\n" + HIDDEN,
    "a request": HIDDEN,
    "nothing": b"",
    "line ends": b"\r\n\r\n",
    "not text": bytes(range(256)),
    "large": BODY + b" " * 300_000,
}

HEADERS: dict[str, tuple[bytes, dict[str, str | None]]] = {
    # as sent, and what of it the replica must see: None is what it must not
    "none": (b"", {}),
    "hop by hop": (
        b"Connection: keep-alive, X-Foo , x-bar\r\nX-Foo: 1\r\nX-Bar: 2\r\nX-Baz: 3\r\nKeep-Alive: timeout=5\r\n"
        b"TE: trailers\r\nTrailer: X-T\r\nProxy-Authorization: x\r\nProxy-Connection: close\r\n",
        {"X-Foo": None, "X-Bar": None, "X-Baz": "3", "Keep-Alive": None, "TE": None, "Trailer": None}
        | {"Proxy-Authorization": None, "Proxy-Connection": None, "Connection": None},
    ),
    "an upgrade": (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n",
        {"Upgrade": None, "HTTP2-Settings": None, "Connection": None},
    ),
    "the length as hop by hop": (b"Connection: content-length, host, transfer-encoding\r\n", {"Connection": None}),
    "the router's own": (
        b"X-Warmroute-Tenant: mallory\r\nx-warmroute-expect-cached-tokens: 9\r\nX-WARMROUTE-Anything: 1\r\n",
        {"x-warmroute-tenant": None, "x-warmroute-expect-cached-tokens": None, "x-warmroute-anything": None},
    ),
    "odd values": (
        b'X-Tab:\t a\tb \r\nX-Empty:\r\nX-Latin: \xe9\r\nX-Colon: a: b\r\nX-Quote: "\\"\r\n',
        {"X-Tab": "a\tb", "X-Empty": "", "X-Colon": "a: b", "X-Quote": '"\\"'},
    ),
    "lookalikes": (
        b"Content_Length: 3\r\nTransfer.Encoding: chunked\r\nX-Content-Length: 3\r\n",
        {"Content_Length": "3", "Transfer.Encoding": "chunked", "X-Content-Length": "3"},
    ),
    "long": (b"X-Long: " + b"x" * 12_000 + b"\r\n", {"X-Long": "x" * 12_000}),
}


def by_length(body: bytes) -> bytes:
    return b"Content-Length: %d\r\n\r\n" % len(body) + body


def by_chunks(body: bytes) -> bytes:
    parts = [body[:1], body[1:50], body[50:]]
    chunks = b"".join(b'%X ;a="b\r\n%b\r\n'.replace(b'"b', b"1") % (len(part), part) for part in parts if part)
    return b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"000;last\r\nContent-Length: 3\r\nX-Trailer: 1\r\n\r\n"


def by_expectation(body: bytes) -> bytes:
    return b"Expect: 100-continue\r\n" + by_length(body)


FRAMINGS = (by_length, by_chunks, by_expectation)


async def sent(b: Bench, data: bytes, answers: int) -> None:
    """On one connection, at once; until so many answers have come."""
    host, port = b.router.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        async with asyncio.timeout(20):
            while answers:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"HTTP/1.1 100 "):
                    continue
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.partition(b":")[2]))
                answers -= 1
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("frame", FRAMINGS)
async def test_a_body_is_a_body_whatever_it_looks_like_and_however_it_is_framed(
    bench: BenchFactory, frame: object
) -> None:
    assert callable(frame)
    b = await bench(1)
    b.replicas[0].behave = refuse(200)
    for name, (body, (headers, expected)) in (
        (f"{n}, {h}", (BODIES[n], HEADERS[h])) for n, h in product(BODIES, HEADERS)
    ):
        before = len(b.replicas[0].seen)
        head = b"POST /v1/passed?q=1&r=%2F HTTP/1.1\r\nHost: spoofed\r\n" + headers
        await sent(b, (head + frame(body)) * 2, 2)
        seen = b.replicas[0].seen[before:]
        assert [(each.method, each.path, each.body) for each in seen] == [("POST", "/v1/passed?q=1&r=%2F", body)] * 2, (
            name
        )
        for each in seen:
            _has_one_of_each(each, len(body), b.replicas[0].id)
            for header, value in expected.items():
                assert each.headers.get(header) == value, (name, header)
    await b.settled()


def _has_one_of_each(seen: Seen, length: int, host: str) -> None:
    headers: CIMultiDict[str] = seen.headers
    assert headers.getall("Host") == [host]
    assert headers.getall("Content-Length") == [str(length)]
    assert len(headers.getall("x-request-id")) == 1
    assert not {"Transfer-Encoding", "Expect", "X-Trailer"} & set(headers)


async def test_pipelined_requests_of_all_sizes_and_framings_stay_apart(bench: BenchFactory) -> None:
    b = await bench(1)
    b.replicas[0].behave = refuse(200)
    chosen = Random(5)
    bodies = [BODY + b" " * chosen.choice((0, 1, 100, 5_000, 70_000, 400_000)) for _ in range(24)]
    line = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n".encode()
    await sent(b, b"".join(line + chosen.choice(FRAMINGS)(body) for body in bodies), len(bodies))
    assert [seen.body for seen in b.replicas[0].seen] == bodies
    await b.settled()


@pytest.mark.parametrize(
    "target",
    [
        "/v1/../admin",
        "/v1/./x",
        "/v1/x/..",
        "/v1/%2e%2e/admin",
        "/v1/%2E./admin",
        "/v1/..%2fadmin",
        "/v1/..%5cadmin",
        "/v1/..\\admin",
        "/v1/..;/admin",
        "//v1/x",
        "/V1/x",
        "http://elsewhere/admin",
        "*",
    ],
)
async def test_no_target_leads_out_of_what_is_passed_through(bench: BenchFactory, target: str) -> None:
    b = await bench(1)
    await sent(b, f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode(), 1)
    assert b.seen == 0


@pytest.mark.parametrize(
    ("target", "passed"),
    [
        ("http://elsewhere/v1/x?a=1", "/v1/x?a=1"),
        ("/v1/a%2Fb", "/v1/a%2Fb"),
        ("/v1/%C3%A9?q=%0d%0aHost:y", "/v1/%C3%A9?q=%0d%0aHost:y"),
        ("/v1/x%00", "/v1/x%00"),
        ("/v1/%252e%252e/x", "/v1/%252e%252e/x"),
        ("/v1/x//y", "/v1/x//y"),
        ("/v1/a...b/..c", "/v1/a...b/..c"),
    ],
)
async def test_targets_pass_as_they_came(bench: BenchFactory, target: str, passed: str) -> None:
    b = await bench(1)
    b.replicas[0].behave = refuse(200)
    await sent(b, f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode(), 1)
    assert [seen.path for seen in b.replicas[0].seen] == [passed]
    assert "Content-Length" not in b.replicas[0].seen[0].headers
