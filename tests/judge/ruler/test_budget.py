"""How the space of a prompt is shared between texts."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from judge.ruler.budget import allocate, split_overlapping

sizes = st.lists(st.integers(0, 10_000), min_size=1, max_size=12)


@given(sizes, st.integers(0, 60_000))
def test_all_room_is_used_if_any_text_is_cut(wanted: list[int], room: int) -> None:
    got = allocate(wanted, room)
    assert all(g <= w for g, w in zip(got, wanted, strict=True))
    assert sum(got) <= room
    if sum(wanted) <= room:
        assert got == wanted
    else:
        assert sum(got) > room - len(wanted)
    cut = [g for g, w in zip(got, wanted, strict=True) if g < w]
    assert max(cut, default=0) - min(cut, default=0) <= 1  # what is cut is cut to the same length
    assert all(g <= min(cut, default=g) + 1 or g < w for g, w in zip(got, wanted, strict=True) if cut)


@given(sizes, st.integers(0, 20_000), st.integers(1_000, 40_000))
def test_subsets_cover_all_members_and_overlap_with_their_neighbours(
    wanted: list[int], context: int, room: int
) -> None:
    found = split_overlapping(wanted, context, room, 4, 2)
    assert {i for piece in found for i in piece} == set(range(len(wanted)))
    assert all(len(piece) >= min(4, len(wanted)) for piece in found)
    for a, b in pairwise(found):
        assert len(set(a) & set(b)) >= 2
    if context + sum(wanted) <= room:
        assert len(found) == 1


def test_a_member_that_is_too_long_for_any_subset_does_not_split_the_group() -> None:
    assert split_overlapping([1_000_000, *[100] * 7], 0, 10_000, 4, 2) == [range(8)]
    assert len(split_overlapping([5_000] * 8, 0, 10_000, 4, 2)) == 3


def test_a_long_context_leaves_half_of_the_room() -> None:
    assert allocate([1_000_000, 100, 100], 10_000) == [9_800, 100, 100]
    assert split_overlapping([500] * 8, 1_000_000, 10_000, 4, 2) == [range(8)]
