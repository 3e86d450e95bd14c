"""Shares of time, and what bounds the speed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.statistics.utilization import bound_by, busy_share

TIMES = st.tuples(st.integers(-5, 25), st.integers(0, 8)).map(lambda s: (s[0], s[0] + s[1]))


@given(st.lists(TIMES, max_size=8))
def test_a_share_is_the_union_of_the_spans_within_the_time(spans: list[tuple[int, int]]) -> None:
    covered = {second for first, last in spans for second in range(first, last)} & set(range(20))
    assert busy_share(spans, 0, 20) == len(covered) / 20


@pytest.mark.parametrize(
    ("sampling", "training", "word"),
    [(0.95, 0.5, "sampling"), (0.5, 0.95, "training"), (0.95, 0.99, "training"), (0.5, 0.7, "agents")],
)
def test_the_busier_one_bounds_the_speed(sampling: float, training: float, word: str) -> None:
    assert bound_by(sampling, training) == word
