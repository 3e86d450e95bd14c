"""Every interval of a mean contains the true mean with a probability of at least 0.95, from two values on."""

from __future__ import annotations

from collections.abc import Callable
from math import lgamma

import numpy as np
import numpy.typing as npt
import pytest

from journeywork.statistics import mean_of, paired_difference

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
