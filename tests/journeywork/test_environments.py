"""`journeywork run-env` with an environment of verifiers: two optimizer steps.

The package is in an environment of its own, `.venv-environments`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from journeywork.environments import UnusableEnvironmentError, finite_numbers, load_environment, main
from tests.conftest import InferenceDouble
from tests.kits.environments import environment
from tests.kits.installation import ROOT, Up, program, up

HERE = Path(__file__).parent


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Up]:
    flags = ("--set", "models.0.name=tictactoe", "--set", f"models.0.base={InferenceDouble.base}")
    with up(tmp_path, tmp_path / "run", "--run-dir", str(tmp_path / "run"), *flags) as found:
        yield found


@pytest.fixture(scope="module")
def python() -> str:
    return str(environment("environments") / "python")


def run_env(running: Up, python: str, *args: str) -> dict[str, Any]:
    flags = ("--model", "tictactoe", "--url", running.url, "--sampling", '{"max_tokens": 24}', "--json")
    command = [python, "-m", "journeywork.environments", "spelling-env", *args, *flags]
    told: dict[str, Any] = json.loads(program(command, HERE, PYTHONPATH=f"{ROOT}:{HERE}"))
    assert told["failed"] == 0
    return told


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first run installs the packages
def test_an_environment_of_verifiers_trains(python: str, running: Up) -> None:
    spelled = run_env(running, python, "--tasks", "12", "--args", '{"most": 30, "rows": 12}')
    assert spelled["runs"] == 96
    assert set(spelled["metrics"]) >= {"near", "has_cell"}
    # The double ends one reply in twelve at once: such an attempt has a reward (0) and is no failure.
    assert 0 < spelled["metrics"]["empty_reply"] < 0.3
    assert spelled["metrics"]["near"] == pytest.approx(spelled["reward"])
    running.until_step(2)
    held_out = run_env(running, python, "--tasks", "2", "--held-out", "--pinned", "tictactoe@0")
    assert held_out["runs"] == 16
    running.stop()

    (row,) = running.query(
        "SELECT count(*) AS runs, avg(reward) AS reward, sum(exchanges) AS calls "
        "FROM trajectories WHERE split = 'train'"
    )
    assert (row["runs"], row["calls"]) == (96, 96)
    assert row["reward"] == pytest.approx(spelled["reward"])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["x", "--args", "[1]"], "--args must be a JSON object, not [1]"),
        (["x", "--sampling", "{"], "--sampling is no JSON"),
    ],
)
def test_what_can_t_be_run_is_said_so(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*args, "--model", "m"])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_metrics_are_finite_numbers() -> None:
    found = {"a": 1, "b": True, "c": "x", "d": float("nan"), "e": [1]}
    assert finite_numbers(found) == {"a": 1.0, "b": 1.0}


def test_a_package_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = ModuleType("verifiers")
    newer.__version__ = "0.4.0"  # type: ignore[attr-defined]
    for module, said in (
        (newer, r"verifiers 0\.4\.0 is installed, .* 0\.1\.12 to 0\.3\.0 are supported"),
        (None, r"not installed .* pip install '\./journeywork\[verifiers\]'"),
    ):
        monkeypatch.setitem(sys.modules, "verifiers", module)  # type: ignore[arg-type]
        with pytest.raises(UnusableEnvironmentError, match=said):
            load_environment("gsm8k", {})
