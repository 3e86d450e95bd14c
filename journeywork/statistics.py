"""Means with 95 % intervals, for evaluations. Standard library only.

`wilson` is the score interval of E. B. Wilson (1927), "Probable inference, the law of succession, and statistical
inference".
The intervals of means are Student's; with few values they need values that are roughly normal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_Z95 = 1.959964
_T95 = (
    12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139,
    2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922, 2.093024, 2.085963,
    2.079614, 2.073873, 2.068658, 2.063899, 2.059539, 2.055529, 2.051831, 2.048407, 2.045230, 2.042272,
)  # fmt: skip


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


def mean_or_share(values: Sequence[float]) -> Estimate:
    """Return the mean of `values`: `wilson` if each is 0 or 1, else `mean_of`."""
    if values and all(value in (0.0, 1.0) for value in values):
        return wilson(round(math.fsum(values)), len(values))
    return mean_of(values)


def t95(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution with `freedom` degrees of freedom (1 or more), from a
    table or by its expansion around the normal quantile (Abramowitz and Stegun, 26.7.5)."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z, v = _Z95, freedom
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)


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
