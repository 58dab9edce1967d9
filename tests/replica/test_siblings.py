from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from replica.siblings import Sibling, Siblings

contents = st.lists(st.integers(0, 300), min_size=1, max_size=4)  # above 255: tokens of several bytes


def pack(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


def shared(left: list[int], right: list[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


@given(st.lists(contents, max_size=12, unique_by=tuple), contents, st.data())
def test_the_closest_is_as_close_as_the_best_that_brute_force_finds(
    family: list[list[int]], wanted: list[int], data: st.DataObject
) -> None:
    packed: list[bytes | None] = [pack(tokens) for tokens in family]
    siblings = Siblings(packed)
    for block in range(len(family)):
        siblings.add(7, block)
    gone = data.draw(st.sets(st.sampled_from(range(len(family))))) if family else set()
    for block in gone:
        siblings.discard(7, block)
    left = {block: tokens for block, tokens in enumerate(family) if block not in gone}
    best = max((shared(tokens, wanted) for tokens in left.values()), default=0)
    found = siblings.closest(7, pack(wanted))
    if best:
        assert found is not None
        assert found.tokens == best == shared(left[found.block], wanted)
    else:
        assert found is None
    assert len(siblings) == len(left)
    assert sorted(siblings.of(7)) == sorted(left)


def test_families_are_apart_and_an_empty_one_is_forgotten() -> None:
    siblings = Siblings([pack([1, 2]), pack([1, 3])])
    siblings.add(5, 0)
    siblings.add(6, 1)
    assert siblings.closest(5, pack([1, 3])) == Sibling(0, 1)
    assert siblings.closest(9, pack([1, 3])) is None
    siblings.discard(6, 1)
    assert list(siblings.of(6)) == []
    assert not siblings._families.get(6)
