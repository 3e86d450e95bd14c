"""How the space of a prompt is shared between texts."""

from hypothesis import given
from hypothesis import strategies as st

from judge.ruler.prompt import allocate

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


def test_a_long_context_leaves_half_of_the_room() -> None:
    assert allocate([1_000_000, 100, 100], 10_000) == [9_800, 100, 100]
