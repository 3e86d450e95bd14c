"""Means with 95 % intervals, of evaluations and of what the services show. Standard library only.

An interval is Student's, over the values and one more value at each end of their range, and half a step of such a mean
wider (`Sample._centre_and_half`). The two values are those of A. Agresti and B. Caffo (2000), "Simple and effective
confidence intervals for proportions and differences of proportions result from adding two successes and two failures";
without them an interval collapses where all values are equal, and leaves rare values out. The half step is the
correction for continuity of F. Yates (1934). Such an interval covers the true mean with a probability of at least 0.95
from two values on, whatever they are distributed like, which `tests/journeywork/test_statistics.py` simulates.

The range is assumed: values from 0 to 1 are taken for rewards of 0 to 1, others from -1 to 1 for rewards of -1 to 1.
Where a value lies beyond, the range is unknown: then it is that of the values seen, the interval contains Student's,
and it holds for values that are roughly normal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_Z95 = 1.959964
"""The 97.5 % quantile of the normal distribution."""
_T95 = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.306, 2.26216, 2.22814, 2.20099, 2.17881)
"""That of Student's t distribution with 1 to 12 degrees of freedom."""


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
    return _estimate(values)


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Return the mean of `after - before` over the same tasks in the same order. Unequal lengths raise `ValueError`."""
    both = [*before, *after]
    low, high = _assumed_range(min(both, default=0.0), max(both, default=0.0))
    # Values from 0 to 1 differ by -1 to 1.
    return _estimate([b - a for a, b in zip(before, after, strict=True)], (low - high, high - low))


def _estimate(values: Sequence[float], bounds: tuple[float, float] | None = None) -> Estimate:
    """Return the mean of `values` with its interval. `bounds`: the range of the values, where it is known otherwise."""
    if not values:
        return Estimate(math.nan, math.nan, math.nan, 0)
    sample = Sample.of(values)
    return Estimate(sample.mean, *sample.interval(bounds), sample.count)


def _assumed_range(least: float, greatest: float) -> tuple[float, float]:
    """Return the range that is assumed of values from `least` to `greatest`; infinite if it is unknown."""
    if least < -1 or greatest > 1:
        return -math.inf, math.inf
    return (0.0 if least >= 0 else -1.0), 1.0


@dataclass(frozen=True)
class Sample:
    """What the interval of a mean needs to know of values. `variance`: of the sample, `None` for a single value."""

    count: int
    mean: float
    variance: float | None
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        """Return the sample of one value or more."""
        count = len(values)
        mean = math.fsum(values) / count
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1) if count > 1 else None
        return cls(count, mean, variance, min(values), max(values))

    def interval(self, bounds: tuple[float, float] | None = None) -> tuple[float, float]:
        """Return the ends of the interval of the mean; they are infinite if nothing is known. `bounds`: the range of
        the values, in place of the one that is assumed."""
        low, high = self._range(bounds)
        centre, half = self._centre_and_half(low, high)
        return min(max(centre - half, low), self.mean), max(min(centre + half, high), self.mean)

    def difference(self, other: Sample) -> tuple[float, float]:
        """Return the ends of the interval of this mean less the one of other, independent values."""
        (low, high), (other_low, other_high) = self._range(), other._range()
        centre, half = self._centre_and_half(low, high)
        other_centre, other_half = other._centre_and_half(other_low, other_high)
        mean, of_centres, of_halves = self.mean - other.mean, centre - other_centre, math.hypot(half, other_half)
        return (
            min(max(of_centres - of_halves, low - other_high), mean),
            max(min(of_centres + of_halves, high - other_low), mean),
        )

    def _range(self, bounds: tuple[float, float] | None = None) -> tuple[float, float]:
        """Return the range of the values: `bounds`, or the one that is assumed; infinite for a single value."""
        if self.count < 2:
            return -math.inf, math.inf
        return bounds or _assumed_range(self.least, self.greatest)

    def _centre_and_half(self, low: float, high: float) -> tuple[float, float]:
        """Return the centre and half the width of the interval before it is cut to the range `low` to `high` of the
        values; the half is infinite if nothing is known."""
        known = math.isfinite(low)
        if not known:
            low, high = self.least, self.greatest
        if self.variance is None or low == high:
            return self.mean, math.inf
        # Student's interval over the values and one more value at each end of the range.
        n = self.count
        centre = (n * self.mean + low + high) / (n + 2)
        squares = self.variance * (n - 1) + n * (self.mean - centre) ** 2
        squares += (low - centre) ** 2 + (high - centre) ** 2
        half = t95(n + 1) * math.sqrt(squares / (n + 1) / (n + 2))
        half += (high - low) / 2 / (n + 2)  # half a step of a mean of so many values
        if known:
            return centre, half
        student = t95(n - 1) * math.sqrt(self.variance / n)
        ends = min(centre - half, self.mean - student), max(centre + half, self.mean + student)
        return (ends[0] + ends[1]) / 2, (ends[1] - ends[0]) / 2


def finite(value: float) -> float | None:
    """Return `value`, or `None` if it is NaN or infinite, which JSON does not know."""
    return value if math.isfinite(value) else None


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
