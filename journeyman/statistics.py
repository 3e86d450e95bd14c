"""Means with 95 % intervals, for evaluations. Standard library only.

`wilson` is the score interval of E. B. Wilson (1927), "Probable inference, the law of succession, and statistical
inference".
The intervals of means use the normal approximation, which needs about 30 values or more.
"""

from __future__ import annotations

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
    half = _Z95 * math.sqrt(variance / count)
    return Estimate(mean, mean - half, mean + half, count)


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
    return Estimate(share, centre - half, centre + half, trials)
