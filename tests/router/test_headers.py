"""Nothing that a client or a replica sends can end a header line or stand in for the router's word."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from router.headers import RequestIds, response_headers, safe_value


@given(st.text(max_size=2000))
def test_a_value_is_always_one_printable_line_of_bounded_length(value: str) -> None:
    assert re.fullmatch(r"[\x20-\x7e]{0,512}", safe_value(value))


def test_what_is_plain_passes_as_it_is() -> None:
    assert safe_value("replica-1 (eu/west), 42%") == "replica-1 (eu/west), 42%"


def test_a_replica_id_with_a_line_break_cannot_add_a_header() -> None:
    headers = response_headers({}, [("x-warmroute-replica", "a\r\nSet-Cookie: evil=1")])
    assert headers["x-warmroute-replica"] == "a?Set-Cookie: evil=1"


def test_repeated_headers_stay_repeated_and_the_routers_own_are_there_once() -> None:
    received = CIMultiDict(
        [("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("X-Request-Id", "theirs"), ("Connection", "close")]
    )
    headers = response_headers(received, [("x-request-id", "ours")])
    assert headers.getall("Set-Cookie") == ["a=1", "b=2"]
    assert headers.getall("X-Request-Id") == ["ours"]
    assert "Connection" not in headers


@given(st.text(max_size=300))
def test_an_id_is_the_clients_or_a_new_one_and_always_sane(given_id: str) -> None:
    ids = RequestIds()
    chosen = ids.of(given_id)
    assert re.fullmatch(r"[A-Za-z0-9._:/+=-]{1,128}", chosen)
    assert ids.of(None) != ids.of(None)
