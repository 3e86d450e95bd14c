"""Curves at trackers: what a run is called, and which points are sent."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config import Config, CurvesConfig
from pipeline.errors import ConfigError
from store.showing.curves.trackers import WandB, check_trackers, runs_of
from tests.store.showing.curves.kit import row


def test_a_run_is_known_by_project_model_branch_and_run_folder(tmp_path: Path) -> None:
    def identity(project: str = "p", folder: str = "a", **of: str) -> tuple[str, str]:
        config = Config(project=project, run_dir=str(tmp_path / folder))
        return runs_of(config, tmp_path).identity(row(1, **of))  # type: ignore[arg-type]

    assert identity() == identity()
    others = [identity(), identity("q"), identity(folder="b"), identity(model="n"), identity(branch="try")]
    assert len({run_id for run_id, _ in others}) == len({name for _, name in others}) == 5
    assert others[4][1].startswith("m+try-")
    config = Config(project="p", curves=CurvesConfig(tracker_project="ours"))
    assert runs_of(config, tmp_path).project == "ours"


@pytest.mark.parametrize("name", ["wandb"])
def test_a_missing_library_is_named(name: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"curves\.trackers.*`{name}` is not installed.*docs/install\.md"):
        check_trackers(Config(curves=CurvesConfig(trackers=(name,))))
    check_trackers(Config(curves=CurvesConfig(trackers=(name,), enabled=False)))


def test_points_that_a_resumed_run_of_wandb_holds_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    logged: list[int] = []
    run = SimpleNamespace(step=2, log=lambda _, step, commit: logged.append(step))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run, Settings=dict))
    tracker = WandB(runs_of(Config(), tmp_path))
    for step in (1, 2, 3):
        tracker.add(row(step))
    assert logged == [2, 3]
