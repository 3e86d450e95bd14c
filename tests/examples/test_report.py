"""Figures at the end of the demo."""

from __future__ import annotations

import pytest

from examples.tictactoe.agent import Finished
from examples.tictactoe.report import wilson, win_rate


def test_wilson_interval() -> None:
    # Newcombe 1998, table I: 15 of 148, score method without continuity correction.
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    low, high = wilson(0, 20)
    assert low == pytest.approx(0)
    assert high == pytest.approx(0.1611, abs=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)


def test_games_without_a_result_count_for_nothing() -> None:
    games = [
        Finished("a", "g", "win", 1, 0),
        Finished("b", "g", "draw", 0.4, 0),
        Finished("c", "g", None, 0, 0),
    ]
    rate = win_rate(games)
    assert (rate["value"], rate["games"]) == (0.5, 2)
    assert rate["outcomes"] == {"win": 1, "draw": 1, "loss": 0, "illegal": 0}
