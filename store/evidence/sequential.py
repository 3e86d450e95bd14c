"""Intervals and tests of a mean that hold however often one looks: for decisions that are taken while results come.

A bettor starts with a capital of 1 and bets a fixed share of it on each value against "the mean is at most m". If the
mean is at most m, the capital is a supermartingale that is never negative, so it reaches 1/alpha with a probability of
at most alpha, at whatever time one looks (Ville's inequality). The capital of several bettors, averaged, has the same
property. The bets are those of I. Waudby-Smith and A. Ramdas (2021), "Estimating means of bounded random variables by
betting", section 4; the mixture over bettors is H. Robbins' (1970), "Statistical methods related to the law of the
iterated logarithm"; that such intervals hold at all times together is S. R. Howard, A. Ramdas, J. McAuliffe and
J. Sekhon (2021), "Time-uniform, nonparametric, nonasymptotic confidence sequences".

Nothing is assumed of the values but their range, and that the mean of each, given those before it, is the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_BETS = np.array([0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.18, 0.27, 0.4, 0.6, 0.85])
"""Shares of the capital. The best one is about the mean over the variance of a difference, which nobody knows."""
_HALVINGS = 40
"""Of the range from 0 to 1, until the end of an interval is known to 1e-12."""


class Interval(NamedTuple):
    """Where the true mean lies."""

    low: float
    high: float


def interval(values: Sequence[float], low: float, high: float, alpha: float = 0.05) -> Interval:
    """Return the interval of the mean of `values`, each within `low` and `high`, after the last of them.

    The intervals after each value contain the true mean, all of them together, with a probability of at least
    1 - `alpha`; each lies within the one before it. Raises `ValueError` for a value beyond the range, or for a range or
    an `alpha` that makes no sense."""
    if not low < high or not 0 < alpha < 1:
        raise ValueError(f"from {low:g} to {high:g} at alpha {alpha:g} is no interval: low < high, 0 < alpha < 1")
    if not values:
        return Interval(low, high)
    given = np.asarray(values, dtype=np.float64)
    if not np.all((given >= low) & (given <= high)):
        beyond = next(v for v in values if not low <= v <= high)
        raise ValueError(f"the value {beyond:g} is not within the declared range, {low:g} to {high:g}")
    scaled = (given - low) / (high - low)
    least, most = _lower_end(scaled, alpha / 2), 1 - _lower_end(1 - scaled, alpha / 2)
    width = high - low
    return Interval(low + width * least, low + width * most)


def _lower_end(scaled: npt.NDArray[np.float64], alpha: float) -> float:
    """Return the lower end of the interval of the mean of `scaled`, values from 0 to 1: the largest m for which the
    bets refuse that the mean is at most m; 0 if there is none. The capital falls with m, so halving finds it."""
    least, most = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        if _is_refused(scaled, middle, alpha):
            least = middle
        else:
            most = middle
    return least


def _is_refused(scaled: npt.NDArray[np.float64], m: float, alpha: float) -> bool:
    """Return whether the averaged capital of those who bet that the mean is above `m` ever reached 1/`alpha`."""
    logs = np.log1p(_BETS[:, None] * (scaled / m - 1)).cumsum(axis=1)
    highest = logs.max(axis=0)  # without it, the exponential could overflow
    capital = highest + np.log(np.exp(logs - highest).mean(axis=0))
    return bool(capital.max() >= -math.log(alpha))
