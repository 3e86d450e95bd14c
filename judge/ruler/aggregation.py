"""From several judge passes over a group to one score per trajectory, without the judge's position bias.

A pass is one call of the judge model over a group, in an order of its own. A judge that favours a position in the list
favours another trajectory when the order changes. `PositionBias` estimates the effect of each position from all groups
judged so far, by least squares; `aggregate` subtracts it and averages. `judge.ruler.ruler` uses both.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.events.types import REWARD_TOLERANCE

_RIDGE = 2.0
"""Regularisation towards no position effect, in units of groups judged twice."""
_DECAY = 0.995
"""Factor on a group's weight for each later group: the estimate follows about the last 200 groups."""

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class JudgePass:
    """Scores of one pass over a group, in the order in which the judge saw them."""

    order: tuple[str, ...]
    scores: Mapping[str, float]


def draw_orders(ids: Sequence[str], count: int, rng: random.Random) -> list[list[str]]:
    """Return `count` random orders. Of 20 draws each, the one that shares the fewest positions with the order before
    is taken, so that each trajectory changes its place."""
    orders: list[list[str]] = []
    for _ in range(count):
        draws = [rng.sample(ids, len(ids)) for _ in range(20)]
        before = orders[-1] if orders else []
        orders.append(min(draws, key=lambda order: sum(map(operator.eq, order, before))))
    return orders


class PositionBias:
    """The effect of each position on a judge's scores, by length of the list N; estimated from groups with several
    passes."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[npt.NDArray[np.float64], Vector, float, float]] = {}
        """By N: A [N, N] and b [N] of the normal equations A x = b, the sum of squares, and the degrees of freedom."""

    def update(self, passes: Sequence[JudgePass]) -> None:
        """Add the passes over one group to the estimate. A single pass is ignored: it does not tell positions from
        trajectories."""
        if len(passes) < 2:
            return
        n = len(passes[0].order)
        a, b, squares, count = self._sums.get(n, (np.zeros((n, n)), np.zeros(n), 0.0, 0.0))
        a, b, squares, count = a * _DECAY, b * _DECAY, squares * _DECAY, count * _DECAY
        for name in passes[0].order:  # its scores, each as a difference from their mean, are explained by its positions
            positions = np.zeros((len(passes), n))
            for row, judged in enumerate(passes):
                positions[row, judged.order.index(name)] = 1.0
            scores = np.array([p.scores[name] for p in passes])
            centred = positions - positions.mean(axis=0)
            residual = scores - scores.mean()
            a = a + centred.T @ centred
            b = b + centred.T @ residual
            squares += float(residual @ residual)
            count += len(passes) - 1
        self._sums[n] = (a, b, squares, count)

    def effects(self, n: int) -> Vector:
        """Return the score that each of `n` positions adds [n], mean 0. Effects that noise could explain are shrunk
        towards 0."""
        if n not in self._sums:
            return np.zeros(n)
        a, b, squares, count = self._sums[n]
        raw = np.linalg.solve(a + _RIDGE * np.eye(n), b)
        raw = raw - raw.mean()
        # The variance of the residuals of the fit, and from it that of each effect, by which the effect is shrunk.
        noise = max(squares - 2 * float(b @ raw) + float(raw @ a @ raw), 0.0) / max(count - n + 1, 1.0)
        error = noise / (np.diag(a) + _RIDGE)
        shrunk = raw * np.maximum(0.0, 1.0 - error / np.maximum(raw**2, 1e-12))
        return np.asarray(shrunk - shrunk.mean())

    def first_position_effect(self) -> float | None:
        """Return how much the first position adds compared with the others, weighted over the lengths of lists; `None`
        if no group of two or more with two passes was added yet."""
        effects = {n: self.effects(n) for n in self._sums if n > 1}
        weights = {n: self._sums[n][3] for n in effects}
        total = sum(weights.values())
        return sum(float(e[0] - e[1:].mean()) * weights[n] for n, e in effects.items()) / total if total else None


def aggregate(passes: Sequence[JudgePass], bias: PositionBias) -> dict[str, float]:
    """Return the mean score of each trajectory over the passes, from 0 to 1, less the effects of the positions at which
    it was shown."""
    effects = bias.effects(len(passes[0].order))
    sums = dict.fromkeys(passes[0].order, 0.0)
    for judged in passes:
        for name, effect in zip(judged.order, effects, strict=True):
            sums[name] += judged.scores[name] - float(effect)
    return {name: min(max(total / len(passes), 0.0), 1.0) for name, total in sums.items()}


def pairwise_agreement(a: Mapping[str, float], b: Mapping[str, float]) -> float | None:
    """Return the share of pairs of trajectories that two passes, each with scores by trajectory, put into the same
    order. A pair that is tied in only one of them counts half. `None` without pairs."""
    signs = pair_signs(a, b)
    agreed = sum(1.0 if first == second else 0.5 if 0 in (first, second) else 0.0 for first, second in signs)
    return agreed / len(signs) if signs else None


def pair_signs(a: Mapping[str, float], b: Mapping[str, float]) -> list[tuple[int, int]]:
    """Return for each pair of names with scores in both mappings how `a` and how `b` order it: -1, 0 or 1. By these
    `pairwise_agreement` and `judge.labelled` count how often two scorings agree."""
    pairs = itertools.combinations(sorted(a.keys() & b.keys()), 2)
    return [(sign(a[x] - a[y]), sign(b[x] - b[y])) for x, y in pairs]


def sign(difference: float) -> int:
    """Return -1, 0 or 1; 0 for rewards that count as equal: a difference of at most `REWARD_TOLERANCE`."""
    return 0 if abs(difference) <= REWARD_TOLERANCE else (1 if difference > 0 else -1)
