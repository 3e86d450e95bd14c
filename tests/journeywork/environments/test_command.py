"""`journeywork run-env` with environments of verifiers and OpenEnv: two optimizer steps each.

The packages are in an environment of their own, `.venv-environments`.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from journeywork.environments.command import main
from journeywork.environments.scenarios import numbers
from tests.conftest import InferenceDouble, free_port
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
    command = [
        python,
        "-m",
        "journeywork.environments.command",
        *args,
        "--model",
        "tictactoe",
        "--url",
        running.url,
    ]
    sampling = ["--sampling", '{"max_tokens": 24}', "--json"]
    told: dict[str, Any] = json.loads(program([*command, *sampling], HERE, PYTHONPATH=f"{ROOT}:{HERE}"))
    assert told["failed"] == 0
    return told


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first run installs the packages
def test_environments_of_verifiers_and_openenv_train(python: str, running: Up, tmp_path: Path) -> None:
    spelled = run_env(
        running, python, "verifiers:spelling-env", "--tasks", "12", "--args", '{"most": 30, "rows": 12}'
    )
    assert spelled["runs"] == 96
    assert set(spelled["metrics"]) >= {"near", "has_cell"}
    # The double ends one reply in twelve at once: such an attempt has a reward (0) and is no failure.
    assert 0 < spelled["metrics"]["empty_reply"] < 0.3
    assert spelled["metrics"]["near"] == pytest.approx(spelled["reward"])
    running.until_step(2)
    held_out = run_env(
        running, python, "verifiers:spelling-env", "--tasks", "2", "--held-out", "--pinned", "tictactoe@0"
    )
    assert held_out["runs"] == 16

    with counting_server(running, python, tmp_path) as url:
        before = httpx.get(f"{running.url}/v1/policies").json()["data"][0]["step"]
        counted = run_env(running, python, url, "--tasks", "12")
    assert counted["runs"] == 96
    assert counted["metrics"]["steps"] == 2.0
    assert (counted["metrics"]["done"], counted["metrics"]["malformed"]) == (1.0, 0.0)
    running.until_step(before + 2)
    running.stop()

    rows = running.query(
        "SELECT task LIKE 'seed %' AS openenv, count(*) AS runs, avg(reward) AS reward, sum(exchanges) AS calls "
        "FROM trajectories WHERE split = 'train' GROUP BY 1 ORDER BY 1"
    )
    assert [(row["openenv"], row["runs"], row["calls"]) for row in rows] == [(False, 96, 96), (True, 96, 192)]
    assert [row["reward"] for row in rows] == pytest.approx([spelled["reward"], counted["reward"]])


@contextmanager
def counting_server(running: Up, python: str, folder: Path) -> Iterator[str]:
    port = free_port()
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [python, str(HERE / "counting_server.py"), str(port)], stdout=log, stderr=log
        )
    try:
        url = f"http://127.0.0.1:{port}"
        running.until(lambda: server.poll() is not None or answers(url))
        assert server.poll() is None, (folder / "server.log").read_text()
        yield url
    finally:
        server.kill()
        server.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.TransportError:
        time.sleep(0.1)
        return False


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["gsm8k"], "'gsm8k' is no environment: write verifiers:<name>"),
        (["verifiers:x", "--args", "[1]"], "--args must be a JSON object, not [1]"),
        (["verifiers:x", "--sampling", "{"], "--sampling is no JSON"),
    ],
)
def test_what_can_t_be_run_is_said_so(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*args, "--model", "m"])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_metrics_are_finite_numbers() -> None:
    assert numbers({"a": 1, "b": True, "c": "x", "d": float("nan"), "e": [1]}) == {"a": 1.0, "b": 1.0}
    assert numbers(None) == {}
