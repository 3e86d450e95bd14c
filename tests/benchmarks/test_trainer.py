"""The flags of the benchmark of the trainer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import trainer


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["trainer", *flags])
    trainer.main()


def test_too_few_rounds_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "model_folder", None)
    with pytest.raises(SystemExit):
        run(monkeypatch, "--rounds", "3")
    assert "--rounds 3: write 4 or more" in capsys.readouterr().err


def test_the_fewest_rounds_count_a_step_of_each_side_and_the_command_names_the_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def measure(shape: str, base: str, threads: int, rounds: int) -> dict[str, Any]:
        turns = trainer._WARM_UP["journeywork"] + rounds
        counted.append(len(range(0, turns, trainer._THEIR_ROUNDS)) - trainer._WARM_UP["trl"])
        return {}

    monkeypatch.setattr(trainer, "model_folder", str)
    monkeypatch.setattr(trainer, "measure", measure)
    monkeypatch.setattr(trainer, "compare", lambda shape, steps: {})
    out = tmp_path / "out.json"
    run(monkeypatch, "--rounds", "4", "--shapes", "short", "--out", str(out))
    assert counted == [1]
    assert json.loads(out.read_text())["command"].endswith("--rounds 4 --shapes short")
