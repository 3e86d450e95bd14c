"""The notebooks run from top to bottom, and are kept without outputs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import InferenceDouble
from tests.kits.installation import ROOT, up

FOLDER = ROOT / "examples" / "notebooks"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")


def run(name: str, cwd: Path, monkeypatch: pytest.MonkeyPatch, **env: str) -> list[Any]:
    """Run a notebook in a kernel of this Python. Returns its code cells; a cell that raises fails the test."""
    for key, value in {
        "PYTHONPATH": str(ROOT),
        "IPYTHONDIR": str(cwd),
        "JUPYTER_PLATFORM_DIRS": "1",
        **env,
    }.items():
        monkeypatch.setenv(key, value)
    notebook = nbformat.read(FOLDER / name, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(cwd)}}).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell: Any) -> str:
    """All that a cell shows, as text."""
    return "".join(
        output.get("text", "") + "".join(str(v) for v in output.get("data", {}).values())
        for output in cell.outputs
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_run_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.access(sys.executable, os.X_OK)
    run_dir = tmp_path / "run"
    flags = ("--set", "models.0.name=tictactoe", "--set", f"models.0.base={InferenceDouble.base}")
    with up(tmp_path, run_dir, "--run-dir", str(run_dir), *flags) as running:
        cells = run(
            "train.ipynb",
            tmp_path,
            monkeypatch,
            JOURNEYWORK_URL=running.url,
            JOURNEYWORK_MODEL="tictactoe",
            PASSES="2",
        )
        assert " over 40" in shown(cells[-3])
        assert "reward   tictactoe@0 " in shown(cells[-2])
        running.until_step(1)
    told = "".join(map(shown, run("history.ipynb", tmp_path, monkeypatch, JOURNEYWORK_RUN_DIR=str(run_dir))))
    for word in ("tictactoe@1", "user: ", "share_without_variance", "tictactoe@0"):
        assert word in told


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_no_outputs_are_kept(path: Path) -> None:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    assert all(
        not cell["outputs"] and cell["execution_count"] is None
        for cell in cells
        if cell["cell_type"] == "code"
    )
    assert path.stat().st_size < 20_000
