"""Every interval of a mean contains the true mean with a probability of at least 0.95, from two values on, and is not
much wider than that takes."""

import math
import random
from collections.abc import Callable
from math import comb, lgamma

import numpy as np
import numpy.typing as npt
import pytest

from journeywork.statistics import Sample, mean_of, paired_difference, t95

Values = npt.NDArray[np.float64]
COUNTS = (2, 3, 5, 10, 30, 100, 400, 2000)
_REPEATS = 500
_MOST_MISSED = 41
"""More of 500 would have a probability below 1 in 500 at 5 %."""


@pytest.mark.parametrize("count", COUNTS)
def test_of_shares_at_every_share(count: int) -> None:
    """Exactly: the probability of each number of successes, at shares beside the ends of the intervals, where coverage
    is the least."""
    found = [mean_of([1.0] * wins + [0.0] * (count - wins)) for wins in range(count + 1)]
    low, high = np.array([e.low for e in found]), np.array([e.high for e in found])
    ends = np.concatenate([low, high])[:: max(count // 100, 1)]
    shares = np.concatenate([ends - 1e-9, ends + 1e-9, np.linspace(0.001, 0.999, 99)])
    wins = np.arange(count + 1)
    choices = np.array([lgamma(count + 1) - lgamma(w + 1) - lgamma(count - w + 1) for w in wins])
    for share in shares[(shares > 0) & (shares < 1)]:
        chance = np.exp(choices + wins * np.log(share) + (count - wins) * np.log1p(-share))
        assert chance[(low <= share) & (share <= high)].sum() >= 0.95, share


def _missed(count: int, name: str, mean: float, interval: Callable[[np.random.Generator], tuple[float, float]]) -> int:
    rng = np.random.default_rng(list(f"{name}/{count}".encode()))
    ends = (interval(rng) for _ in range(_REPEATS))
    return sum(not low - 1e-9 <= mean <= high + 1e-9 for low, high in ends)


MEANS: dict[str, tuple[float, Callable[[np.random.Generator, int], Values]]] = {
    "uniform": (0.5, lambda rng, n: rng.random(n)),
    "skewed": (0.05, lambda rng, n: rng.beta(0.1, 1.9, n)),
    "almost always 1": (0.98, lambda rng, n: (rng.random(n) < 0.98).astype(float)),
    "rarely 1, else about 0.3": (0.314, lambda rng, n: np.where(rng.random(n) < 0.02, 1, rng.uniform(0.2, 0.4, n))),
    "-1, 0 or 1": (-0.1, lambda rng, n: rng.choice([-1.0, 0.0, 1.0], n, p=[0.4, 0.3, 0.3])),
    "normal, of unknown range": (5.0, lambda rng, n: rng.normal(5, 3, n)),
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", MEANS)
def test_of_means(name: str, count: int) -> None:
    """Few values from -1 to 1 may not show that there are negative ones, so their range is not known."""
    mean, draw = MEANS[name]
    if name == "-1, 0 or 1" and count < 5:
        return

    def interval(rng: np.random.Generator) -> tuple[float, float]:
        found = mean_of(draw(rng, count).tolist())
        return found.low, found.high

    assert _missed(count, name, mean, interval) <= _MOST_MISSED


def _shares(before: float, changes: float) -> Callable[[np.random.Generator, int], tuple[Values, Values]]:
    """Rewards of 0 or 1, of which a share changes to the other."""

    def draw(rng: np.random.Generator, n: int) -> tuple[Values, Values]:
        first = (rng.random(n) < before).astype(float)
        return first, np.where(rng.random(n) < changes, 1 - first, first)

    return draw


def _continuous(rng: np.random.Generator, n: int) -> tuple[Values, Values]:
    first = rng.beta(0.3, 0.6, n)
    return first, np.where(rng.random(n) < 0.1, rng.random(n), first)


PAIRS: dict[str, tuple[float, Callable[[np.random.Generator, int], tuple[Values, Values]]]] = {
    "equal": (0.0, _shares(0.5, 0.5)),
    "equal, few change": (0.0, _shares(0.5, 0.05)),
    "better": (0.24, _shares(0.1, 0.3)),
    "nearly always better": (0.931, _shares(0.01, 0.95)),
    "continuous": (0.1 * (0.5 - 1 / 3), _continuous),
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", PAIRS)
def test_of_paired_differences(name: str, count: int) -> None:
    difference, draw = PAIRS[name]

    def interval(rng: np.random.Generator) -> tuple[float, float]:
        before, after = draw(rng, count)
        found = paired_difference(before.tolist(), after.tolist())
        return found.low, found.high

    assert _missed(count, name, difference, interval) <= _MOST_MISSED


@pytest.mark.parametrize(("first", "second"), [(2, 2), (3, 3), (5, 5), (20, 20), (2, 10), (5, 60), (60, 60)])
def test_a_difference_of_shares_is_covered_at_every_pair_of_shares(first: int, second: int) -> None:
    def samples(count: int) -> list[Sample]:
        return [Sample.of([1.0] * wins + [0.0] * (count - wins)) for wins in range(count + 1)]

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
    def interval(rng: np.random.Generator) -> tuple[float, float]:
        return Sample.of(rng.beta(0.1, 0.9, first).tolist()).difference(Sample.of(rng.beta(2, 1, second).tolist()))

    assert _missed(first, "skewed", 0.1 - 2 / 3, interval) <= _MOST_MISSED


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
    assert Sample.of([0.5]).difference(Sample.of([0.5, 1.0])) == (-math.inf, math.inf)


def test_quantiles_of_student_are_the_tables() -> None:
    table = {1: 12.70620, 2: 4.30265, 3: 3.18245, 6: 2.44691, 8: 2.30600, 10: 2.22814, 13: 2.16037, 30: 2.04227}
    for freedom, quantile in table.items():
        assert t95(freedom) == pytest.approx(quantile, rel=3e-5)
    assert t95(10**9) == pytest.approx(1.959964)
