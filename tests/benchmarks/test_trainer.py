"""The flags of the benchmark of the trainer."""

from __future__ import annotations

import sys

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
