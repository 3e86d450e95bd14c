"""The notebooks run from top to bottom, and are kept without outputs."""

import json
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

from journeywork.starter.command import write_project
from tests.conftest import InferenceDouble
from tests.kits.installation import JOURNEYWORK, ROOT, program, up

FOLDER = ROOT / "examples" / "notebooks"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")


def run(name: str, cwd: Path, monkeypatch: pytest.MonkeyPatch, **env: str) -> list[Any]:
    """Run a notebook in a kernel of this Python. Returns its code cells; a cell that raises fails the test."""
    for key, value in {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(cwd), "JUPYTER_PLATFORM_DIRS": "1", **env}.items():
        monkeypatch.setenv(key, value)
    notebook = nbformat.read(FOLDER / name, as_version=4)
    # A port that Jupyter has chosen is the kernel's only a second later, when a server of another test may have it.
    sockets = Config(KernelManager={"transport": "ipc", "ip": str(cwd / "kernel")})
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(cwd)}}, config=sockets).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell: Any) -> str:
    """All that a cell shows, as text."""
    return "".join(
        output.get("text", "") + "".join(str(v) for v in output.get("data", {}).values()) for output in cell.outputs
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_starter_project_trains_and_is_evaluated_and_the_notebooks_train_on_and_ask_its_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of the project's README, with a small model before the inference double."""
    project = tmp_path / "tictactoe"  # the double serves this name
    run_dir = project / "runs" / "tictactoe"
    write_project("tictactoe", project)
    base = ["--set", f"models.0.base={InferenceDouble.base}"]
    with up(tmp_path, run_dir, "--config", "journeywork.toml", *base, cwd=project) as running:
        said = program([sys.executable, "agent.py", "--passes", "1"], project, JOURNEYWORK_URL=running.url)
        assert [line.partition(":")[0] for line in said.splitlines()] == ["pass 0"]
        running.until_step(1)
        played = ["--rollout", "agent:play", "--scenarios", "agent:held_out", "--limit", "4", "--json"]
        told = json.loads(program([*JOURNEYWORK, "eval", "tictactoe@0", *played], project))
        assert {m["name"] for m in told["entrants"][0]["measures"]} == {"reward", "right"}
        url = running.url
        cells = run(
            "train.ipynb", tmp_path, monkeypatch, JOURNEYWORK_URL=url, JOURNEYWORK_MODEL="tictactoe", PASSES="1"
        )
        assert " over 40" in shown(cells[-3])
        assert "reward   tictactoe@0 " in shown(cells[-2])
    runs = "SELECT split, count(*) AS runs FROM trajectories GROUP BY split ORDER BY split"
    assert running.query(runs) == [{"split": "train", "runs": 2 * 128}, {"split": "val", "runs": 4 + 2 * 40}]
    evaluated = "SELECT entrant FROM evaluations WHERE measure = 'right' ORDER BY scenarios, position"
    assert [row["entrant"] for row in running.query(evaluated)] == ["tictactoe@0", "tictactoe", "tictactoe@0"]
    told = "".join(map(shown, run("history.ipynb", tmp_path, monkeypatch, JOURNEYWORK_RUN_DIR=str(run_dir))))
    for word in ("tictactoe@1", "user: ", "share_without_variance", "tictactoe@0"):
        assert word in told


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_no_outputs_are_kept(path: Path) -> None:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")
    assert path.stat().st_size < 20_000
