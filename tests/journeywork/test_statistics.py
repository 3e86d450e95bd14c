from __future__ import annotations

import math
import random

import pytest

from journeywork.statistics import mean_of, paired_difference, t95


def test_intervals_of_two_hundred_pairs_are_useful() -> None:
    """At most an eighth wider than Student's, which leaves the true difference out too often."""
    rng = random.Random(0)
    for changed in (0.15, 0.5):
        before = [float(rng.random() < 0.5) for _ in range(200)]
        after = [1 - b if rng.random() < changed else b for b in before]
        found = paired_difference(before, after)
        variance = sum((b - a - found.mean) ** 2 for a, b in zip(before, after, strict=True)) / 199
        assert found.high - found.low < 1.125 * 2 * t95(199) * math.sqrt(variance / 200)


def test_little_is_known_of_little() -> None:
    assert math.isnan(mean_of([]).mean)
    assert (mean_of([3.0]).low, mean_of([3.0]).mean) == (-math.inf, 3.0)


def test_quantiles_of_student_are_the_tables() -> None:
    table = {1: 12.70620, 2: 4.30265, 3: 3.18245, 6: 2.44691, 8: 2.30600, 10: 2.22814, 13: 2.16037, 30: 2.04227}
    for freedom, quantile in table.items():
        assert t95(freedom) == pytest.approx(quantile, rel=3e-5)
    assert t95(10**9) == pytest.approx(1.959964)
