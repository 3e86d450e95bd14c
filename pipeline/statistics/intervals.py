"""95 % intervals of means and of their differences, for what the store shows.

`journeywork.statistics` says what they assume and whose they are. That package and these folders import nothing of each
other, so the formula is here once more; `tests/pipeline/statistics/test_intervals.py` compares the two.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_Z95 = 1.959964
_T95 = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.306, 2.26216, 2.22814, 2.20099, 2.17881)


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
        variance = statistics.variance(values) if len(values) > 1 else None
        return cls(len(values), statistics.fmean(values), variance, min(values), max(values))

    def interval(self) -> tuple[float, float]:
        """Return the ends of the interval of the mean; they are infinite if nothing is known."""
        centre, half = self._centre_and_half()
        low, high = self._bounds()
        return min(max(centre - half, low), self.mean), max(min(centre + half, high), self.mean)

    def difference(self, other: Sample) -> tuple[float, float]:
        """Return the ends of the interval of this mean less the one of other, independent values."""
        (centre, half), (other_centre, other_half) = self._centre_and_half(), other._centre_and_half()
        (low, high), (other_low, other_high) = self._bounds(), other._bounds()
        mean, of_centres, of_halves = (self.mean - other.mean, centre - other_centre, math.hypot(half, other_half))
        return (
            min(max(of_centres - of_halves, low - other_high), mean),
            max(min(of_centres + of_halves, high - other_low), mean),
        )

    def _bounds(self) -> tuple[float, float]:
        """The range that is assumed of the values."""
        if self.count < 2 or self.least < -1 or self.greatest > 1:
            return -math.inf, math.inf
        return (0.0 if self.least >= 0 else -1.0), 1.0

    def _centre_and_half(self) -> tuple[float, float]:
        """The centre of the interval without regard to the range, and half of its width."""
        low, high = self._bounds()
        known = low > -math.inf
        if not known:
            low, high = self.least, self.greatest
        if self.count < 2 or self.variance is None or low == high:
            return self.mean, math.inf
        n = self.count
        centre = (n * self.mean + low + high) / (n + 2)
        squares = self.variance * (n - 1) + n * (self.mean - centre) ** 2
        squares += (low - centre) ** 2 + (high - centre) ** 2
        half = t95(n + 1) * math.sqrt(squares / (n + 1) / (n + 2)) + (high - low) / 2 / (n + 2)
        if known:
            return centre, half
        student = t95(n - 1) * math.sqrt(self.variance / n)
        ends = min(centre - half, self.mean - student), max(centre + half, self.mean + student)
        return (ends[0] + ends[1]) / 2, (ends[1] - ends[0]) / 2


def t95(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution with `freedom` degrees of freedom, 1 or more."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z, v = _Z95, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )
