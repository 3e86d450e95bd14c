"""The comparison of a teacher with GRPO, on a few games."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import teacher
from examples.tictactoe.make_model import MODEL_DIR
from trainer.checkpoints.checkpoint import adapter_files


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_each_way_is_measured_on_the_same_games(tmp_path: Path) -> None:
    engine, state = teacher.new_engine(3, 1, tmp_path)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name, content in adapter_files(state.weights, engine.model.lora, str(MODEL_DIR)).items():
        (adapter / name).write_bytes(content)
    out = tmp_path / "teacher.json"
    games = 2 * teacher.BATCH
    teacher.main(
        [
            "--seeds",
            "1",
            "--games",
            str(games),
            "--held-out",
            "50",
            "--teacher",
            str(adapter),
            "--out",
            str(out),
        ]
    )
    result = json.loads(out.read_text())
    assert result["wins"]["teacher"] == result["wins"]["base"]  # the adapter changes nothing
    assert set(result["seeds"]["1"]) == set(teacher.ARMS)
    for arm in result["seeds"]["1"].values():
        assert set(arm["wins_after_games"]) == {str(teacher.BATCH), str(games)}
