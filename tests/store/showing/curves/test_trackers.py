"""Curves at trackers: what a run is called, and what each library itself reads back, also after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config import Config, CurvesConfig
from pipeline.errors import ConfigError
from store.showing.curves.trackers import WandB, check_trackers, runs_of
from tests.kits.environments import ROOT, environment
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


def test_points_that_a_resumed_run_of_wandb_holds_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    logged: list[int] = []
    run = SimpleNamespace(step=2, log=lambda _, step, commit: logged.append(step))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run, Settings=dict))
    tracker = WandB(runs_of(Config(), tmp_path))
    for step in (1, 2, 3):
        tracker.add(row(step))
    assert logged == [2, 3]


def run_program(name: str, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run `tracker_program.py` with the libraries of the trackers, offline and in `folder`."""
    env = {
        "PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline",
    }  # fmt: skip
    python = str(environment("trackers") / "python")
    return subprocess.run(
        [python, "-m", "tests.store.showing.curves.tracker_program", name, str(folder), *args],
        cwd=folder, env=env, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)  # the first one installs the libraries
@pytest.mark.parametrize("name", ["wandb"])
def test_the_library_itself_reads_every_point_back_also_after_a_kill(name: str, tmp_path: Path) -> None:
    """Two starts that end, one that is killed as soon as the library took the points, and one that sends all again."""
    killed = run_program(name, tmp_path, "kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    for action in ("send", "read"):
        done = run_program(name, tmp_path, action)
        assert done.returncode == 0, done.stderr
    runs: dict[str, list[list[Any]]] = json.loads(done.stdout.splitlines()[-1])
    points = {label.rsplit("-", 1)[0]: found for label, found in runs.items()}
    evaluated = "m-evaluations"
    assert set(points) == {"m", "m+try", "n", evaluated}
    once = [["loss/train", 1, 0.1]]
    assert all(
        points[name][:1] == once and points[name] == once * len(points[name]) for name in ("m+try", "n")
    )
    assert ["eval/held_out/reward", 1, 0.75] in points[evaluated]
    losses = [(step, value) for metric, step, value in points["m"] if metric == "loss/train"]
    assert set(losses) == {
        (step, step / 10) for step in (1, 2, 3, 4, 5)
    }  # each start leaves a folder of its own
