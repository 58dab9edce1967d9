from __future__ import annotations

from collections.abc import Sequence as Items

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.block_moves import Copy, Move, Offload, Onload, carry_out

BLOCKS = 4
TOKENS = 2

places = st.integers(0, BLOCKS - 1)
moves = st.lists(
    st.one_of(
        st.builds(Copy, places, places, st.integers(1, TOKENS)),
        st.builds(Offload, places, places),
        st.builds(Onload, places, places),
    ),
    max_size=30,
)


class Mover:
    """Carries out each call's moves at once, as a GPU does: all is read before anything is written, in any order."""

    def __init__(self) -> None:
        self.device = [[f"d{block}.{token}" for token in range(TOKENS)] for block in range(BLOCKS)]
        self.host = [[f"h{block}.{token}" for token in range(TOKENS)] for block in range(BLOCKS)]
        self.calls: list[list[Move]] = []

    def copy_blocks(self, moves: Items[Copy]) -> None:
        self.calls.append(list(moves))
        for move in reversed(moves):
            self.device[move.target][: move.tokens] = self.device[move.source][: move.tokens]

    def offload_blocks(self, moves: Items[Offload]) -> float:
        self.calls.append(list(moves))
        for move in reversed(moves):
            self.host[move.target] = list(self.device[move.source])
        return 0.25 * len(moves)

    def onload_blocks(self, moves: Items[Onload]) -> float:
        self.calls.append(list(moves))
        for move in reversed(moves):
            self.device[move.target] = list(self.host[move.source])
        return 0.5 * len(moves)


@given(moves)
def test_moves_in_few_calls_have_the_effect_of_one_by_one(log: list[Move]) -> None:
    at_once, one_by_one = Mover(), Mover()
    carry_out(at_once, log)
    for move in log:
        carry_out(one_by_one, [move])
    assert (at_once.device, at_once.host) == (one_by_one.device, one_by_one.host)
    assert [move for call in at_once.calls for move in call] == log


def test_neighbours_of_one_kind_that_do_not_meet_are_one_call() -> None:
    mover = Mover()
    log: list[Move] = [Offload(0, 1), Offload(1, 0), Onload(1, 0), Onload(0, 2), Copy(0, 1, 1), Copy(0, 3, 2)]
    carry_out(mover, log)
    assert mover.calls == [log[:2], log[2:4], log[4:]]


def test_what_crossed_between_the_tiers_is_counted_with_the_time_it_took() -> None:
    log: list[Move] = [Offload(0, 1), Copy(0, 1, 1), Offload(1, 2), Offload(2, 3), Onload(1, 0), Onload(2, 1)]
    assert carry_out(Mover(), log) == (3, 0.75, 2, 1.0)
    assert carry_out(Mover(), []) == (0, 0.0, 0, 0.0)


@pytest.mark.parametrize("second", [Copy(1, 2, 2), Copy(2, 0, 2), Copy(3, 1, 2)])
def test_copies_that_meet_are_carried_out_one_after_the_other(second: Copy) -> None:
    mover = Mover()
    carry_out(mover, [Copy(0, 1, 2), second])
    assert len(mover.calls) == 2
