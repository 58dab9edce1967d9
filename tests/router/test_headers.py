"""Nothing that a client or a replica sends can end a header line or stand in for the router's word."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from router.headers import RequestIds, response_headers, safe_value
from router.http1 import parse_head


@given(st.text(max_size=2000))
def test_a_value_is_always_one_printable_line_of_bounded_length(value: str) -> None:
    assert re.fullmatch(r"[\x20-\x7e]{0,512}", safe_value(value))


def test_what_is_plain_passes_as_it_is() -> None:
    assert safe_value("replica-1 (eu/west), 42%") == "replica-1 (eu/west), 42%"


def test_a_replica_id_with_a_line_break_cannot_add_a_header() -> None:
    headers = response_headers(parse_head(b"HTTP/1.1 200 OK"), [("x-warmroute-replica", "a\r\nSet-Cookie: evil=1")])
    assert headers == b"x-warmroute-replica: a?Set-Cookie: evil=1\r\n"


def test_repeated_headers_stay_repeated_and_the_routers_own_are_there_once() -> None:
    received = parse_head(
        b"HTTP/1.1 200 OK\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nX-Request-Id: theirs\r\n"
        b"Request-Id: theirs\r\nX-Hop: 1\r\nConnection: close, X-Hop"
    )
    headers = response_headers(received, [("x-request-id", "ours")])
    assert headers == b"Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nx-request-id: ours\r\n"


_NAMES = [
    "Connection",
    "keep-alive",
    "TE",
    "X-Request-Id",
    "request-id",
    "X-Warmroute-View",
    "x-warmroute",
    "x-hop",
    "Tex",
]


@given(
    st.lists(
        st.tuples(st.sampled_from(_NAMES), st.sampled_from(["", "close", "X-Hop", "te: x", "keep-alive, x-hop", "1"])),
        max_size=6,
    )
)
def test_what_a_replica_says_passes_but_for_what_is_not_for_clients(headers: list[tuple[str, str]]) -> None:
    lines = [f"{name}: {value}" for name, value in headers]
    received = parse_head("\r\n".join(["HTTP/1.1 200 OK", *lines]).encode())
    named = {part.strip().lower() for name, value in headers if name == "Connection" for part in value.split(",")}
    own = {"connection", "keep-alive", "te", "x-request-id", "request-id", "x-warmroute-view"}
    kept = [f"{name}: {value}" for name, value in headers if name.lower() not in own | named]
    expected = "".join(f"{line}\r\n" for line in [*kept, "x-request-id: ours"])
    assert response_headers(received, [("x-request-id", "ours")]).decode() == expected


@given(st.binary(max_size=300))
def test_an_id_is_the_clients_or_a_new_one_and_always_sane(given_id: bytes) -> None:
    ids = RequestIds()
    chosen = ids.of(given_id)
    assert re.fullmatch(r"[A-Za-z0-9._:/+=-]{1,128}", chosen)
    assert ids.of(None) != ids.of(None)
