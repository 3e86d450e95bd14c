from __future__ import annotations

import math
import random

import pytest

from journeywork.statistics import mean_of, mean_or_share, paired_difference, t95, wilson


def test_the_interval_of_a_mean_is_the_textbooks() -> None:
    found = mean_of([1.0, 2.0, 3.0, 4.0])
    assert (found.mean, found.count) == (2.5, 4)
    assert found.high - found.mean == pytest.approx(3.182446 * math.sqrt(5 / 3 / 4), rel=1e-6)


def test_wilson_agrees_with_published_values() -> None:
    # Newcombe (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for successes, trials, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        found = wilson(successes, trials)
        assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_pairs_take_out_what_the_tasks_differ_in() -> None:
    rng = random.Random(0)
    before = [rng.gauss(0, 10) for _ in range(200)]
    after = [b + 0.5 + rng.gauss(0, 0.1) for b in before]
    paired = paired_difference(before, after)
    assert paired.low < 0.5 < paired.high
    assert paired.high - paired.low < 0.05
    with pytest.raises(ValueError, match="argument 2 is longer"):
        paired_difference([1.0], [1.0, 2.0])


def test_little_is_known_of_little() -> None:
    assert math.isnan(mean_of([]).mean)
    assert (mean_of([3.0]).low, mean_of([3.0]).mean) == (-math.inf, 3.0)
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0.0, 1.0)


def test_quantiles_of_student_are_the_tables() -> None:
    for freedom, quantile in [
        (1, 12.7062),
        (2, 4.30265),
        (3, 3.18245),
        (9, 2.26216),
        (29, 2.04523),
        (30, 2.04227),
    ]:
        assert t95(freedom) == pytest.approx(quantile, abs=1e-5)
    assert t95(10**9) == pytest.approx(1.959964)


def test_a_share_has_the_interval_of_a_share() -> None:
    assert mean_or_share([1.0] * 15 + [0.0] * 133) == wilson(15, 148)
    assert mean_or_share([0.5, 1.0]) == mean_of([0.5, 1.0])
    assert math.isnan(mean_or_share([]).mean)


def test_wilsons_bounds_at_the_ends_are_exact() -> None:
    for trials in range(1, 200):
        assert wilson(0, trials).low == 0.0 < wilson(0, trials).high < 1.0
        assert 0.0 < wilson(trials, trials).low < wilson(trials, trials).high == 1.0
