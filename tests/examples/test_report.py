"""The figures of the demo's report."""

import pytest

from examples.tictactoe.report import win_rate
from journeywork.evaluation import EntrantResult
from journeywork.evaluation.entrants import parse_entrant
from journeywork.evaluation.results import TaskResult
from journeywork.trajectory import Usage


def test_games_without_a_result_count_for_nothing() -> None:
    batches = [{"win": 0.5, "games": 20.0}, {}, {"win": 0.3, "games": 20.0}]
    tasks = tuple(TaskResult(str(n), values, 1, 0) for n, values in enumerate(batches))
    rate = win_rate(EntrantResult(parse_entrant("m@0"), "m@0", tasks, Usage(), (), 1.0))
    assert (rate["mean"], rate["count"]) == (pytest.approx(0.4), 40)
    assert rate["ci95"][0] < 0.4 < rate["ci95"][1]
