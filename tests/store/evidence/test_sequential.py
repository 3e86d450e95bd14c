"""Intervals that hold at each look."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store.evidence.sequential import interval

VALUES = st.lists(st.floats(-1, 1), min_size=1, max_size=60)


@given(values=VALUES)
@settings(max_examples=60)
def test_an_interval_lies_in_the_range_and_in_those_before_it(values: list[float]) -> None:
    before = interval(values[:-1], -1, 1)
    after = interval(values, -1, 1)
    assert -1 <= after.low <= after.high <= 1
    assert before.low - 1e-9 <= after.low
    assert after.high <= before.high + 1e-9


@given(values=VALUES, low=st.floats(-5, 5), width=st.floats(0.1, 10))
@settings(max_examples=40)
def test_units_and_signs_change_nothing(values: list[float], low: float, width: float) -> None:
    """Of a mean in other units, and of its negative."""
    plain, turned = interval(values, -1, 1), interval([-v for v in values], -1, 1)
    assert (turned.low, turned.high) == pytest.approx((-plain.high, -plain.low), abs=1e-9)
    moved = interval([min(max(low + (v + 1) / 2 * width, low), low + width) for v in values], low, low + width)
    assert ((moved.low - low) / width, (moved.high - low) / width) == pytest.approx(
        ((plain.low + 1) / 2, (plain.high + 1) / 2), abs=1e-6
    )


def test_the_capital_by_hand() -> None:
    """After n ones, the capital against m is the mean over the bets b of (1 + b (1 / m - 1)) ** n."""
    bets = [0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.18, 0.27, 0.4, 0.6, 0.85]

    def capital(m: float, n: int) -> float:
        return sum((1 + b * (1 / m - 1)) ** n for b in bets) / len(bets)

    for n in (1, 5, 40):
        found = interval([1.0] * n, 0, 1, alpha=0.1)
        assert found.high == pytest.approx(1)
        assert capital(found.low, n) == pytest.approx(1 / 0.05, rel=1e-6)


def test_a_difference_is_found() -> None:
    rng = random.Random("difference")
    values = [float(rng.random() < 0.6) - float(rng.random() < 0.4) for _ in range(400)]
    found = interval(values, -1, 1)
    assert found.low > 0
    assert found.low < 0.2 < found.high


@pytest.mark.parametrize(
    ("values", "low", "high", "alpha"),
    [([2.0], 0, 1, 0.05), ([math.nan], 0, 1, 0.05), ([], 1, 1, 0.05), ([], 0, 1, 0.0)],
)
def test_what_is_no_series_is_refused(values: list[float], low: float, high: float, alpha: float) -> None:
    with pytest.raises(ValueError, match=r"range|interval|declared"):
        interval(values, low, high, alpha)
