"""RL, supervised fine-tuning and RL on one adapter: the script, on the double."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.tictactoe.game import CELLS
from tests.conftest import InferenceDouble
from tests.examples.test_two_steps import UNCHECKED, run


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_three_phases_are_one_lineage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOURNEYWORK_URL", raising=False)
    double = InferenceDouble(tmp_path, args=("--words", *CELLS))
    double.model = "tictactoe"
    double.start()
    try:
        run(
            "examples.tictactoe.fine_tuned", "--steps", "1", "--held-out", "20", *UNCHECKED, "--run-dir",
            str(tmp_path / "run"), "--vllm-url", double.url,
        )  # fmt: skip
    finally:
        double.stop()
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [(row["step"], row["parent"], row["trained"]) for row in report["lineage"]] == [
        (1, "tictactoe@0", "rl"),
        (2, "tictactoe@1", "sft"),
        (3, "tictactoe@2", "rl"),
    ]
    assert list(report["win_rate"]) == ["base", "rl", "sft", "rl_again"]
    assert {estimate["count"] for estimate in report["win_rate"].values()} == {10}
