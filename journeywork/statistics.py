"""Means with 95 % intervals, for evaluations. Standard library only.

An interval is Student's, over the values and one more value at each end of their range, and half a step of such a mean
wider (`_estimate`). The two values are those of A. Agresti and B. Caffo (2000), "Simple and effective confidence
intervals for proportions and differences of proportions result from adding two successes and two failures"; without
them an interval collapses where all values are equal, and leaves rare values out. The half step is the correction for
continuity of F. Yates (1934). Such an interval covers the true mean with a probability of at least 0.95 from two values
on, whatever they are distributed like, which `tests/journeywork/test_coverage.py` simulates.

The range is assumed: values from 0 to 1 are taken for rewards of 0 to 1, others from -1 to 1 for rewards of -1 to 1.
Where a value lies beyond, the range is unknown: then it is that of the values seen, the interval contains Student's,
and it holds for values that are roughly normal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_Z95 = 1.959964
_T95 = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.306, 2.26216, 2.22814, 2.20099, 2.17881)


@dataclass(frozen=True)
class Estimate:
    """A mean over `count` values with its 95 % interval from `low` to `high`. Without values, all three are NaN."""

    mean: float
    low: float
    high: float
    count: int

    def text(self, sign: str = "") -> str:
        """Return `0.500 [0.400, 0.600] over 20`, with `?` for an end that is infinite. With the `sign` `+`, a positive
        number has its sign, too."""
        if not self.count:
            return "no value"
        low, high = (f"{end:{sign}.3f}" if math.isfinite(end) else "?" for end in (self.low, self.high))
        return f"{self.mean:{sign}.3f} [{low}, {high}] over {self.count:,}"

    def __str__(self) -> str:
        return self.text()


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean of `values`. For a single value the interval is infinite, and for equal values whose range is
    unknown."""
    return _estimate(values, range_of(values))


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Return the mean of `after - before` over the same tasks in the same order. Unequal lengths raise `ValueError`."""
    differences = [b - a for a, b in zip(before, after, strict=True)]
    bounds = range_of([*before, *after])
    # Values from 0 to 1 differ by -1 to 1.
    return _estimate(differences, bounds and (bounds[0] - bounds[1], bounds[1] - bounds[0]))


def range_of(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the range that is assumed of `values`; `None` if it is unknown."""
    if all(0 <= value <= 1 for value in values):
        return 0.0, 1.0
    return (-1.0, 1.0) if all(-1 <= value <= 1 for value in values) else None


def _estimate(values: Sequence[float], bounds: tuple[float, float] | None) -> Estimate:
    """Return the mean of `values` with its interval. `bounds`: the range of the values, `None` if it is unknown."""
    count = len(values)
    if not count:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(values) / count
    least, greatest = bounds or (min(values), max(values))
    if count < 2 or least == greatest:
        return Estimate(mean, -math.inf, math.inf, count)
    # Student's interval over the values and one more value at each end of the range.
    with_ends = [*values, least, greatest]
    centre = math.fsum(with_ends) / (count + 2)
    half = t95(count + 1) * math.sqrt(math.fsum((v - centre) ** 2 for v in with_ends) / (count + 1) / (count + 2))
    half += (greatest - least) / 2 / (count + 2)  # half a step of a mean of so many values
    if bounds:
        low, high = max(centre - half, least), min(centre + half, greatest)
    else:
        student = t95(count - 1) * math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (count - 1) / count)
        low, high = min(centre - half, mean - student), max(centre + half, mean + student)
    return Estimate(mean, min(low, mean), max(high, mean), count)


def t95(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution with `freedom` degrees of freedom (1 or more), from a
    table or by its expansion around the normal quantile (Abramowitz and Stegun, 26.7.5)."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z, v = _Z95, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )
