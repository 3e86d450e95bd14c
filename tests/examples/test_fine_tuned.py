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
    # Of 144 games that the double plays at random it wins about seven; without one there is nothing to fine-tune on.
    double = InferenceDouble(tmp_path, args=("--words", *CELLS))
    double.model = "tictactoe"
    double.start()
    try:
        run(
            "examples.tictactoe.fine_tuned", "--steps", "2", "--held-out", "20", *UNCHECKED, "--run-dir",
            str(tmp_path / "run"), "--vllm-url", double.url,
        )  # fmt: skip
    finally:
        double.stop()
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [(row["step"], row["parent"], row["trained"]) for row in report["lineage"]] == [
        (step, f"tictactoe@{step - 1}", trained)
        for step, trained in enumerate(("rl", "rl", "sft", "rl", "rl"), 1)
    ]
    assert list(report["win_rate"]) == ["base", "rl", "sft", "rl_again"]
    assert {estimate["count"] for estimate in report["win_rate"].values()} == {10}
