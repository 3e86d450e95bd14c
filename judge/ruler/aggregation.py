"""From several judgings of a group to one score each: orders, position bias, agreement.

A judge that favours a place in the list favours another trajectory when the order changes, so what changes with the
place can be told from what belongs to the trajectory. `PositionBias` estimates the effect of each place from all groups
judged so far; `merge` takes it out and averages. Judgings of overlapping subsets are brought to one level by their
shared trajectories (least squares with an offset for each judging).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_RIDGE = 2.0
"""Strength of the assumption that places don't matter, in groups judged twice."""
_DECAY = 0.995
"""Weight of a judged group once the next one came: the estimate follows about the last 200."""

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Judging:
    """Scores of one judging, in the order in which the judge saw them."""

    order: tuple[str, ...]
    scores: Mapping[str, float]


def orders(ids: Sequence[str], count: int, rng: random.Random) -> list[list[str]]:
    """`count` random orders; neighbours in the list share as few places as chance allows within some tries."""
    out: list[list[str]] = []
    for _ in range(count):
        best: list[str] = []
        fewest = len(ids) + 1
        for _ in range(20):
            shuffled = list(ids)
            rng.shuffle(shuffled)
            same = sum(a == b for a, b in zip(shuffled, out[-1], strict=True)) if out else 0
            if same < fewest:
                best, fewest = shuffled, same
            if fewest == 0 or len(ids) < 2:
                break
        out.append(best)
    return out


class PositionBias:
    """What each place is worth to a judge, by length of the list; measured from groups that were judged repeatedly."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[npt.NDArray[np.float64], Vector, float, float]] = {}

    def learn(self, judgings: Sequence[Judging]) -> None:
        """Take in the judgings of one group over the same trajectories; fewer than two say nothing."""
        if len(judgings) < 2:
            return
        n = len(judgings[0].order)
        a, b, squares, count = self._sums.get(n, (np.zeros((n, n)), np.zeros(n), 0.0, 0.0))
        a, b, squares, count = a * _DECAY, b * _DECAY, squares * _DECAY, count * _DECAY
        for name in judgings[0].order:
            places = np.zeros((len(judgings), n))
            for row, judging in enumerate(judgings):
                places[row, judging.order.index(name)] = 1.0
            scores = np.array([j.scores[name] for j in judgings])
            centred = places - places.mean(axis=0)
            residual = scores - scores.mean()
            a = a + centred.T @ centred
            b = b + centred.T @ residual
            squares += float(residual @ residual)
            count += len(judgings) - 1
        self._sums[n] = (a, b, squares, count)

    def effects(self, n: int) -> Vector:
        """Points that each of `n` places adds, mean 0; what noise could explain is shrunk towards 0."""
        if n not in self._sums:
            return np.zeros(n)
        a, b, squares, count = self._sums[n]
        found = np.linalg.solve(a + _RIDGE * np.eye(n), b)
        found = found - found.mean()
        noise = max(squares - 2 * float(b @ found) + float(found @ a @ found), 0.0) / max(count - n + 1, 1.0)
        error = noise / (np.diag(a) + _RIDGE)
        shrunk = found * np.maximum(0.0, 1.0 - error / np.maximum(found**2, 1e-12))
        return np.asarray(shrunk - shrunk.mean())

    def first_place(self) -> float:
        """What the first place is worth over the others, on average over list lengths."""
        found = [
            (float(e[0] - e[1:].mean()), self._sums[n][3])
            for n in self._sums
            if n > 1
            for e in [self.effects(n)]
        ]
        weight = sum(w for _, w in found)
        return sum(v * w for v, w in found) / weight if weight else 0.0


def merge(judgings: Sequence[Judging], bias: PositionBias | None = None) -> dict[str, float]:
    """One score in 0..1 for each trajectory of any judging, without the effect of places and of judgings."""
    names = list(dict.fromkeys(n for j in judgings for n in j.order))
    corrected = [_corrected(j, bias) for j in judgings]
    if all(len(c) == len(names) for c in corrected):
        found = {n: float(np.mean([c[n] for c in corrected])) for n in names}
    else:
        found = _levelled(names, corrected)
    return {n: min(max(s, 0.0), 1.0) for n, s in found.items()}


def _corrected(judging: Judging, bias: PositionBias | None) -> dict[str, float]:
    effects = bias.effects(len(judging.order)) if bias is not None else np.zeros(len(judging.order))
    return {name: judging.scores[name] - float(effects[i]) for i, name in enumerate(judging.order)}


def _levelled(names: Sequence[str], judgings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Least squares of score = trajectory + judging, offsets of mean 0 (ridge: subsets without a shared one stay)."""
    index = {n: i for i, n in enumerate(names)}
    rows, values = [], []
    for number, judging in enumerate(judgings):
        for name, score in judging.items():
            row = np.zeros(len(names) + len(judgings))
            row[index[name]] = 1.0
            row[len(names) + number] = 1.0
            rows.append(row)
            values.append(score)
    for number in range(len(judgings)):
        row = np.zeros(len(names) + len(judgings))
        row[len(names) + number] = 0.05
        rows.append(row)
        values.append(0.0)
    solution = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)[0]
    found = {n: float(solution[i]) for n, i in index.items()}
    # Levelling may leave 0..1: move and, where need be, compress all alike rather than clamp some.
    low = min(0.0, *found.values())
    high = max(1.0, *(v - low for v in found.values()))
    return {n: (v - low) / high for n, v in found.items()}


def difference(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    """Mean absolute difference over shared trajectories; 0 where none is shared."""
    shared = a.keys() & b.keys()
    return sum(abs(a[n] - b[n]) for n in shared) / len(shared) if shared else 0.0


def agree(judgings: Sequence[Judging], tolerance: float, bias: PositionBias | None = None) -> bool:
    """Whether any two of the judgings say the same."""
    found = [_corrected(j, bias) for j in judgings]
    return any(
        difference(found[i], found[j]) <= tolerance
        for i in range(len(found))
        for j in range(i + 1, len(found))
    )


def concordance(a: Mapping[str, float], b: Mapping[str, float], tie: float = 1e-6) -> float | None:
    """Share of pairs that both put into the same order; a pair tied in one only counts half. None without pairs."""
    names = sorted(a.keys() & b.keys())
    agreed, pairs = 0.0, 0
    for i, x in enumerate(names):
        for y in names[i + 1 :]:
            first, second = _sign(a[x] - a[y], tie), _sign(b[x] - b[y], tie)
            pairs += 1
            if first == second:
                agreed += 1.0
            elif first == 0 or second == 0:
                agreed += 0.5
    return agreed / pairs if pairs else None


def _sign(value: float, tie: float) -> int:
    return 0 if abs(value) <= tie else (1 if value > 0 else -1)
