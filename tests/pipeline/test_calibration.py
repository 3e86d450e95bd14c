"""Isotonic calibration: its properties, and files."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.calibration import Calibration, errors, fit, read_calibration
from pipeline.errors import ConfigError

UNIT = st.integers(0, 100).map(lambda n: n / 100)
PAIRS = st.lists(st.tuples(UNIT, UNIT), min_size=1, max_size=40)


def isotonic(pairs: list[tuple[float, float]]) -> dict[float, float]:
    """The regression by its max-min formula (Barlow et al. 1972, theorem 1.4), in cubic time."""
    levels = sorted({s for s, _ in pairs})

    def mean(low: float, high: float) -> float:
        values = [y for s, y in pairs if low <= s <= high]
        return sum(values) / len(values)

    return {
        level: max(min(mean(low, high) for high in levels if high >= level) for low in levels if low <= level)
        for level in levels
    }


@given(PAIRS, st.lists(UNIT, min_size=2, max_size=10))
def test_it_rises_and_stays_between_the_labels(pairs: list[tuple[float, float]], scores: list[float]) -> None:
    found = fit(pairs)
    values = [found(s) for s in sorted(scores)]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(values))
    labels = [y for _, y in pairs]
    assert all(min(labels) - 1e-9 <= v <= max(labels) + 1e-9 for v in values)


ROUNDED = [(0.0, 0.0)] * 6 + [(0.0, 0.02), (0.0, 0.15), (0.0, 0.79), (0.01, 0.0), (0.01, 0.0), (0.01, 0.32)]
"""Both levels have the mean 0.32 / 3, which floating point gives two ways."""


@given(PAIRS)
@example(ROUNDED)
def test_its_pools_are_those_of_the_isotonic_regression(pairs: list[tuple[float, float]]) -> None:
    expected = isotonic(pairs)
    assert fit(pairs).labels == pytest.approx(sorted({round(y, 9) for y in expected.values()}), abs=1e-8)


@given(PAIRS)
def test_the_order_of_the_pairs_does_not_matter(pairs: list[tuple[float, float]]) -> None:
    shuffled = random.Random(1).sample(pairs, len(pairs))
    assert fit(shuffled).labels == pytest.approx(fit(pairs).labels)


@given(st.lists(UNIT, min_size=1, max_size=20, unique=True))
def test_labels_that_agree_with_the_judge_change_nothing(scores: list[float]) -> None:
    found = fit([(s, s) for s in scores])
    assert [found(s) for s in scores] == pytest.approx(scores)


def test_the_error_is_that_of_groups_that_were_not_fitted() -> None:
    generous = [[(0.8 + 0.02 * i + 0.1 * j, 0.1 + 0.02 * i + 0.5 * j) for j in range(2)] for i in range(8)]
    before, after = errors(generous)
    assert before > 0.25
    assert after < before / 5
    rng = random.Random(3)
    noise = [[(rng.random(), rng.random()) for _ in range(2)] for _ in range(8)]
    fitted = fit([pair for group in noise for pair in group])
    in_sample = sum((fitted(s) - y) ** 2 for group in noise for s, y in group) / 16
    assert errors(noise)[1] > in_sample


@pytest.mark.parametrize(
    "text", ["{}", '{"scores": [], "labels": []}', '{"scores": [0.1, 0.1], "labels": [0, 1]}',
             '{"scores": [0.1, 0.2], "labels": [1, 0]}', '{"scores": [0.1], "labels": [0, 1]}'],
)  # fmt: skip
def test_a_file_that_is_no_calibration_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ConfigError, match=r"the calibration .*c\.json is not one"):
        read_calibration(str(tmp_path / "c.json"))
    with pytest.raises(ConfigError, match="cannot read the calibration"):
        read_calibration(str(tmp_path / "none.json"))


def test_its_id_is_that_of_its_corners() -> None:
    one = Calibration(scores=(0.0, 1.0), labels=(0.25, 0.75))
    assert one.id == Calibration(scores=(0.0, 1.0), labels=(0.25, 0.75)).id
    assert one.id != fit([(0.0, 0.25), (1.0, 0.5)]).id
    assert [one(-1.0), one(0.5), one(2.0)] == [0.25, 0.5, 0.75]
