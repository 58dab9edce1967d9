"""Answers are read the same wherever the network cuts them, and refused where they could be read in two ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.framing import Body, MalformedError, frame
from router.http1 import body_of, parse_head


def body(head: bytes, method: str = "POST") -> Body:
    return body_of(parse_head(b"HTTP/1.1 200 OK\r\n" + head), method)


def fed(into: Body, pieces: list[bytes]) -> bytes:
    return b"".join(into.feed(piece) for piece in pieces)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted(place % (len(data) + 1) for place in places)
    return [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]


@given(st.lists(st.binary(min_size=1, max_size=50)), st.lists(st.integers(0, 10_000)), st.booleans())
def test_chunks_give_the_same_payload_however_they_arrive(chunks: list[bytes], places: list[int], extra: bool) -> None:
    end = b"0;last\r\nX-Trailer: 1\r\n\r\n" if extra else b"0\r\n\r\n"
    chunked = body(b"Transfer-Encoding: chunked")
    assert fed(chunked, cut(b"".join(map(frame, chunks)) + end, places)) == b"".join(chunks)
    assert chunked.complete
    assert not chunked.rest


@given(st.binary(max_size=100), st.lists(st.integers(0, 10_000)))
def test_a_length_is_taken_at_its_word(payload: bytes, places: list[int]) -> None:
    counted = body(b"Content-Length: %d" % len(payload))
    assert fed(counted, cut(payload, places)) == payload
    assert counted.complete
    assert not counted.rest
    assert (counted.feed(b"more"), counted.rest) == (b"", b"more")


def test_without_length_or_chunks_the_end_of_the_connection_ends_the_body() -> None:
    until_closed = body(b"Content-Type: text/plain")
    assert fed(until_closed, [b"a", b"b"]) == b"ab"
    assert not until_closed.complete
    until_closed.end()
    assert until_closed.complete


def test_a_body_that_is_cut_short_never_completes() -> None:
    for head, part in ((b"Content-Length: 5", b"abc"), (b"Transfer-Encoding: chunked", b"5\r\nabc")):
        short = body(head)
        assert short.feed(part) == b"abc"
        short.end()
        assert not short.complete


@pytest.mark.parametrize(("status", "method"), [(204, "POST"), (304, "GET"), (200, "HEAD")])
def test_some_answers_have_no_body_whatever_they_announce(status: int, method: str) -> None:
    assert body_of(parse_head(b"HTTP/1.1 %d X\r\nContent-Length: 9" % status), method).complete


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 1\r\nContent-Length: 2",
        b"Content-Length: 1\r\nTransfer-Encoding: chunked",
        b"Content-Length: +1",
        b"Content-Length: 1, 1",
        b"Content-Length: ",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        b"Name : 1",
        b" folded",
        b"A: 1\nB: 2",
        b"A: 1\rB: 2",
        b"A: \x00",
        b"no colon",
    ],
)
def test_what_two_readers_could_understand_differently_is_refused(head: bytes) -> None:
    with pytest.raises(MalformedError):
        body(head)


@pytest.mark.parametrize("line", [b"", b"HTTP/2 200 OK", b"HTTP/1.1 20 OK", b"HTTP/1.1 099 X", b"\x16\x03\x01"])
def test_what_is_not_http_is_refused(line: bytes) -> None:
    with pytest.raises(MalformedError):
        parse_head(line)


@pytest.mark.parametrize("chunks", [b"5\r\nabcdefg\r\n", b"-1\r\n", b"x\r\n", b"\r\n", b"0x5\r\n", b"f" * 20_000])
def test_chunks_that_contradict_themselves_are_refused(chunks: bytes) -> None:
    with pytest.raises(MalformedError):
        body(b"Transfer-Encoding: chunked").feed(chunks)


def test_a_connection_is_used_again_only_where_both_sides_would_keep_it() -> None:
    assert parse_head(b"HTTP/1.1 200 OK").persistent
    assert not parse_head(b"HTTP/1.1 200 OK\r\nConnection: Close").persistent
    assert not parse_head(b"HTTP/1.0 200 OK\r\nConnection: keep-alive").persistent
