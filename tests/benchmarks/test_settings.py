"""The grid of settings: a short run learns through the engine, and its row can be drawn."""

import dataclasses
import math

import pytest

from benchmarks.settings import EXAMPLES, TASKS, Policy, configured, draw, run, variant_name


def test_a_run_of_the_grid_is_a_row_and_a_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    game = dataclasses.replace(TASKS["game"], steps=2, groups={2: 1, 4: 2, 8: 1}, held_out=8)
    replies: list[int] = []
    answer = Policy.answer
    monkeypatch.setattr(
        Policy, "answer", lambda self, attempts, n: replies.append(len(attempts)) or answer(self, attempts, n)
    )
    changes = {"optimizer.learning_rate": 1e-3}
    row = run(game, EXAMPLES / "tictactoe" / "model", None, changes, 0, 1)
    assert (row["changes"], len(row["rewards"])) == (changes, 2)
    assert max(replies) == 8  # two groups of four, and the held-out games
    assert all(0 <= row[when]["solved"] <= 1 for when in ("before", "after"))
    assert all(math.isfinite(step["grad_norm"]) for step in row["metrics"])
    assert variant_name(changes) == "learning_rate = 0.001"
    assert "learning_rate = 0.001" in draw([{"task": "game", **row}])


@pytest.mark.parametrize("name", TASKS)
def test_every_variant_is_a_setting(name: str) -> None:
    task = TASKS[name]
    for changes in task.variants:
        configured(task, changes, 0, 1)  # raises for what is no setting
    assert task.groups.keys() >= set(task.changes["group_size"])
