"""Intervals of what the store shows."""

from __future__ import annotations

import math
from math import comb
from statistics import fmean, variance

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from journeywork import statistics
from pipeline.statistics.intervals import Sample


def sample(values: list[float]) -> Sample:
    spread = variance(values) if len(values) > 1 else None
    return Sample(len(values), fmean(values), spread, min(values), max(values))


@settings(max_examples=200)
@given(st.floats(0.1, 5).flatmap(lambda most: st.lists(st.floats(-most, most) | st.floats(0, most), min_size=1)))
def test_an_interval_is_the_one_of_an_evaluation(values: list[float]) -> None:
    found = statistics.mean_of(values)
    assert sample(values).interval() == pytest.approx((found.low, found.high), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("first", "second"), [(2, 2), (3, 3), (5, 5), (20, 20), (2, 10), (5, 60), (60, 60)])
def test_a_difference_of_shares_is_covered_at_every_pair_of_shares(first: int, second: int) -> None:
    def samples(count: int) -> list[Sample]:
        return [sample([1.0] * wins + [0.0] * (count - wins)) for wins in range(count + 1)]

    ends = [[one.difference(other) for other in samples(second)] for one in samples(first)]
    low, high = np.moveaxis(np.array(ends), 2, 0)

    def chances(count: int, share: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.array([comb(count, w) * share**w * (1 - share) ** (count - w) for w in range(count + 1)])

    for p in np.linspace(0.02, 0.98, 25):
        for q in np.linspace(0.02, 0.98, 25):
            both = np.outer(chances(first, p), chances(second, q))
            assert both[(low - 1e-9 <= p - q) & (p - q <= high + 1e-9)].sum() >= 0.95


@pytest.mark.parametrize(("first", "second"), [(2, 300), (40, 40), (300, 2000), (2000, 2000)])
def test_a_difference_of_skewed_means_is_covered(first: int, second: int) -> None:
    """More than 41 of 500 would have a probability below 1 in 500 at 5 %."""
    rng, missed = np.random.default_rng(first), 0
    for _ in range(500):
        one, other = rng.beta(0.1, 0.9, first), rng.beta(2, 1, second)
        a, b = (Sample(len(v), v.mean(), v.var(ddof=1), v.min(), v.max()) for v in (one, other))
        low, high = a.difference(b)
        missed += not low <= 0.1 - 2 / 3 <= high
    assert missed <= 41


def test_nothing_is_known_of_a_single_value() -> None:
    assert sample([0.5]).interval() == (-math.inf, math.inf)
    assert sample([0.5]).difference(sample([0.5, 1.0])) == (-math.inf, math.inf)
