"""Calibration of a judge: a rising function from its scores to people's labels.

It is fitted by isotonic regression, with the pool-adjacent-violators algorithm (Barlow, Bartholomew, Bremner and Brunk
1972), and is linear between the centres of the pools (centred isotonic regression, Oron and Flournoy 2017): within the
range of the labelled scores, scores that differ stay different unless the labels say that they do not rise at all.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean

import msgspec

from pipeline.errors import ConfigError


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The function, by its corners: constant outside of them, linear between two of them."""

    scores: tuple[float, ...]
    """Scores of the judge, rising."""
    labels: tuple[float, ...]
    """What people say of such scores, never falling."""

    @property
    def id(self) -> str:
        """The first 16 digits of the SHA-256 of the corners."""
        return hashlib.sha256(msgspec.json.encode((self.scores, self.labels))).hexdigest()[:16]

    def __call__(self, score: float) -> float:
        """Return what people would say of a score."""
        right = bisect_right(self.scores, score)
        if right in (0, len(self.scores)):
            return self.labels[max(right - 1, 0)]
        low, high = self.scores[right - 1 : right + 1]
        share = (score - low) / (high - low)
        return (1 - share) * self.labels[right - 1] + share * self.labels[right]


def fit(pairs: Sequence[tuple[float, float]]) -> Calibration:
    """Fit pairs of a judge's score and a person's label; at least one."""
    pools: list[tuple[float, float, int]] = []  # sums of scores and of labels, number of pairs
    for _, same in groupby(sorted(pairs), key=lambda pair: pair[0]):
        equal = list(same)
        pool = (sum(s for s, _ in equal), sum(y for _, y in equal), len(equal))
        while pools and pools[-1][1] / pools[-1][2] >= pool[1] / pool[2] - 1e-12:  # equal but for rounding
            before = pools.pop()
            pool = (before[0] + pool[0], before[1] + pool[1], before[2] + pool[2])
        pools.append(pool)
    return Calibration(scores=tuple(s / n for s, _, n in pools), labels=tuple(y / n for _, y, n in pools))


def errors(groups: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float]:
    """Return the mean squared difference of scores and labels, and that of calibrated scores and labels, where the
    calibration of a group's scores is fitted to the other groups. `groups`: the pairs of each; at least two."""
    before = [(s - y) ** 2 for group in groups for s, y in group]
    after = []
    for i, group in enumerate(groups):
        of_others = fit([pair for j, other in enumerate(groups) if j != i for pair in other])
        after += [(of_others(s) - y) ** 2 for s, y in group]
    return fmean(before), fmean(after)


def read_calibration(path: str) -> Calibration:
    """Read a file that `journeywork calibrate` wrote. Raises `ConfigError`."""
    try:
        calibration = msgspec.json.decode(Path(path).read_bytes(), type=Calibration)
    except OSError as error:
        raise ConfigError(f"judge: cannot read the calibration {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"judge: the calibration {path} is not one: {error}") from error
    scores, labels = calibration.scores, calibration.labels
    if (
        not scores
        or len(scores) != len(labels)
        or sorted(set(scores)) != [*scores]
        or sorted(labels) != [*labels]
    ):
        raise ConfigError(
            f"judge: the calibration {path} is not one: its scores must rise, its labels not fall"
        )
    return calibration
