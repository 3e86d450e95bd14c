"""Means with 95 % intervals, for evaluations. Standard library only.

`wilson` is the score interval of E. B. Wilson (1927), "Probable inference, the law of succession, and statistical
inference".
The intervals of means are Student's; with few values they need values that are roughly normal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

_Z95 = 1.959964


@dataclass(frozen=True)
class Estimate:
    """A mean over `count` values with its 95 % interval from `low` to `high`. Without values, all three are NaN."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] over {self.count:,}"


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean of `values`. For a single value the interval is infinite."""
    count = len(values)
    if not count:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, -math.inf, math.inf, 1)
    variance = math.fsum((v - mean) ** 2 for v in values) / (count - 1)
    half = t95(count - 1) * math.sqrt(variance / count)
    return Estimate(mean, mean - half, mean + half, count)


def mean_of_share(values: Sequence[float]) -> Estimate:
    """Return the mean of `values`: `wilson` if each is 0 or 1, else `mean_of`."""
    if values and all(value in (0.0, 1.0) for value in values):
        return wilson(round(math.fsum(values)), len(values))
    return mean_of(values)


@functools.cache
def t95(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution with `freedom` degrees of freedom (1 or more).

    From 30 degrees on by its expansion around the normal quantile, below by bisection of the exact distribution
    (Abramowitz and Stegun, 26.7.5 and 26.7.3-4)."""
    if freedom >= 30:
        z, v = _Z95, freedom
        return (
            z
            + (z**3 + z) / (4 * v)
            + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        )
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _central(middle, freedom) < 0.95 else (low, middle)
    return high


def _central(t: float, freedom: int) -> float:
    """Return the probability that a variable with Student's t distribution lies between -t and t."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for power in range(1 + odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * power / (power + 1)
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Return the mean of `after - before` over the same tasks in the same order. Unequal lengths raise `ValueError`."""
    return mean_of([b - a for a, b in zip(before, after, strict=True)])


def wilson(successes: int, trials: int) -> Estimate:
    """Return the share of successes with its score interval. Without trials the interval is 0 to 1."""
    if not trials:
        return Estimate(math.nan, 0.0, 1.0, 0)
    share, z2 = successes / trials, _Z95**2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z95 / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    # The bounds at the ends are exact. Rounding would put them a little beside 0 and 1.
    low = centre - half if successes else 0.0
    high = centre + half if successes < trials else 1.0
    return Estimate(share, low, high, trials)
