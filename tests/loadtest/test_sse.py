"""The parser gives the same events however the bytes were cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.sse import EventTooLongError, SseParser

TEXT = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)
ENDINGS = st.sampled_from([b"\n", b"\r", b"\r\n"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[str]]:
    """Bytes of a stream and the data of its events."""
    ending = draw(ENDINGS)
    sent, expected = b"", []
    for lines in draw(st.lists(st.lists(TEXT, min_size=1, max_size=3), max_size=5)):
        if draw(st.booleans()):
            sent += b": a comment" + ending + b"event: ignored" + ending
        for line in lines:
            sent += b"data: " + line.encode() + ending
        sent += ending
        expected.append("\n".join(lines))
    return sent, expected


@given(stream=streams(), data=st.data())
def test_events_do_not_depend_on_where_the_stream_is_cut(stream: tuple[bytes, list[str]], data: st.DataObject) -> None:
    sent, expected = stream
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    parser = SseParser()
    assert [event for piece in pieces for event in parser.feed(piece)] == expected


def test_an_event_is_given_out_only_when_it_is_complete() -> None:
    parser = SseParser()
    assert parser.feed(b'data: {"a": 1}\n') == []
    assert parser.feed(b"\ndata: [DO") == ['{"a": 1}']
    assert parser.feed(b"NE]\r\n\r\n") == ["[DONE]"]


def test_an_event_without_end_is_refused() -> None:
    parser = SseParser()
    parser.feed(b"x" * (15 << 20))
    with pytest.raises(EventTooLongError):
        parser.feed(b"x" * (2 << 20))
