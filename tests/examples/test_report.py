"""The figures of the demo's report."""

from __future__ import annotations

import numpy as np
import pytest

from examples.tictactoe.agent import Finished
from examples.tictactoe.game import Result
from examples.tictactoe.report import difference, win_rate


def test_games_without_a_result_count_for_nothing() -> None:
    games = [
        Finished("a", "g", "win", 1, 0),
        Finished("b", "g", "draw", 0.4, 0),
        Finished("c", "g", None, 0, 0),
    ]
    rate = win_rate(games)
    assert (rate["value"], rate["games"]) == (0.5, 2)
    assert rate["outcomes"] == {"win": 1, "draw": 1, "loss": 0, "illegal": 0}


def played(*results: Result | None) -> list[Finished]:
    return [Finished(str(i), "g", r, 0.0, 0) for i, r in enumerate(results)]


def test_the_difference_is_that_of_the_same_games() -> None:
    before = played(*["win"] * 40, *["loss"] * 60, None, "win")
    after = played(*["win"] * 35, *["loss"] * 5, *["win"] * 20, *["draw"] * 40, "win", None)
    found = difference(before, after)
    assert (found["games"], found["gained"], found["lost"]) == (100, 20, 5)
    # The differences are 20 of 1, 5 of -1 and 75 of 0.
    values = np.array([1] * 20 + [-1] * 5 + [0] * 75)
    half = 1.984217 * values.std(ddof=1) / 10  # Student's t, 99 degrees of freedom
    assert found["value"] == pytest.approx(0.15)
    assert found["ci95"] == pytest.approx([0.15 - half, 0.15 + half])


def test_pairing_tells_more_than_two_separate_samples() -> None:
    """Most games end alike before and after, so the interval is narrower than that of two independent rates."""
    before, after = played(*["win"] * 50, *["loss"] * 50), played(*["win"] * 60, *["loss"] * 40)
    low, high = difference(before, after)["ci95"]
    independent = 2 * 1.96 * (0.5 * 0.5 / 100 + 0.6 * 0.4 / 100) ** 0.5
    assert high - low < independent / 2


def test_no_games_say_nothing() -> None:
    assert win_rate([])["ci95"] == [0.0, 1.0]
    assert difference([], [])["ci95"] == [-1.0, 1.0]
    assert difference(played("win"), played("loss"))["ci95"] == [-1.0, 1.0]
    with pytest.raises(ValueError, match="shorter"):
        difference(played("win", "win"), played("win"))
