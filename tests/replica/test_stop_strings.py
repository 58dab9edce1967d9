"""Stop strings cut exactly, wherever the pieces of the text end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replica.stop_strings import StopStrings

SHORT = st.text("ab", max_size=12)


def cut(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    strings, shown = StopStrings(stops), ""
    for piece in pieces:
        result = strings.push(piece)
        shown += result.text
        if result.matched is not None:
            return shown, result.matched
    return shown + strings.flush(), None


def naive_cut(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """Character by character: the first stop string that is complete, and of several the longest."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=4), st.lists(SHORT, max_size=6))
def test_the_cut_is_the_naive_one_however_the_text_is_split(stops: list[str], pieces: list[str]) -> None:
    assert cut(tuple(stops), pieces) == naive_cut(tuple(stops), "".join(pieces))


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4), st.lists(SHORT, max_size=6))
def test_nothing_is_held_back_that_cannot_become_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    strings, shown, text = StopStrings(tuple(stops)), "", ""
    for piece in pieces:
        result = strings.push(piece)
        shown, text = shown + result.text, text + piece
        if result.matched is not None:
            return
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopStrings(()).push("abc") == ("abc", None)
