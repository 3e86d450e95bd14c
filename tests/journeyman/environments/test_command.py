"""`journeyman run-env` with environments of verifiers and OpenEnv: two optimizer steps each.

The packages are in an environment of their own: JOURNEYMAN_TEST_ENVIRONMENTS names its Python. Without it, the Python
of the tests is tried.

    python -m venv envs && envs/bin/pip install '.[verifiers]' '.[openenv]'
    JOURNEYMAN_TEST_ENVIRONMENTS=envs/bin/python pytest tests/journeyman/environments
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from journeyman.environments.command import main
from journeyman.environments.scenarios import numbers
from tests.conftest import InferenceDouble, free_port
from tests.kits.installation import ROOT, Up, program, up

HERE = Path(__file__).parent
PYTHON = os.environ.get("JOURNEYMAN_TEST_ENVIRONMENTS", sys.executable)


def needs(package: str) -> None:
    """Skip the test where the package cannot be imported."""
    done = subprocess.run([PYTHON, "-c", f"import {package}"], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        pytest.skip(f"{PYTHON} cannot import {package} ({reason}): set JOURNEYMAN_TEST_ENVIRONMENTS")


@pytest.fixture
def with_verifiers() -> None:
    needs("verifiers.clients")


@pytest.fixture
def with_openenv() -> None:
    needs("openenv.core")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Up]:
    flags = ("--set", "models.0.name=tictactoe", "--set", f"models.0.base={InferenceDouble.base}")
    with up(tmp_path, tmp_path / "run", "--run-dir", str(tmp_path / "run"), *flags) as found:
        yield found


def run_env(running: Up, *args: str) -> dict[str, Any]:
    command = [
        PYTHON,
        "-m",
        "journeyman.environments.command",
        *args,
        "--model",
        "tictactoe",
        "--url",
        running.url,
    ]
    sampling = ["--sampling", '{"max_tokens": 24}', "--json"]
    told: dict[str, Any] = json.loads(program([*command, *sampling], HERE, PYTHONPATH=f"{ROOT}:{HERE}"))
    return told


def check(running: Up, told: dict[str, Any], runs: int) -> None:
    """What the command says is what is on the log, and two steps were trained from it."""
    assert (told["runs"], told["failed"]) == (runs, 0)
    running.until_step(2)
    running.stop()
    query = "SELECT count(*) AS runs, avg(reward) AS reward FROM trajectories WHERE split = 'train'"
    (row,) = running.query(query)
    assert row["runs"] == runs
    assert row["reward"] == pytest.approx(told["reward"])


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_an_environment_of_verifiers_trains(with_verifiers: None, running: Up) -> None:
    told = run_env(
        running, "verifiers:spelling-env", "--tasks", "8", "--passes", "2", "--args", '{"most": 30}'
    )
    assert set(told["metrics"]) >= {"near", "has_cell"}
    # The double ends one reply in twelve at once: such an attempt has a reward (0) and is no failure.
    assert 0 < told["metrics"]["empty_reply"] < 0.3
    assert told["metrics"]["near"] == pytest.approx(told["reward"])
    held_out = run_env(
        running, "verifiers:spelling-env", "--tasks", "2", "--held-out", "--pinned", "tictactoe@0"
    )
    assert held_out["runs"] == 16
    check(running, told, 128)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_an_openenv_server_trains(with_openenv: None, running: Up, tmp_path: Path) -> None:
    port = free_port()
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [PYTHON, str(HERE / "counting_server.py"), str(port)], stdout=log, stderr=log
        )
    try:
        url = f"http://127.0.0.1:{port}"
        running.until(lambda: server.poll() is not None or answers(url))
        assert server.poll() is None, (tmp_path / "server.log").read_text()
        told = run_env(running, url, "--tasks", "8", "--passes", "2")
    finally:
        server.kill()
        server.wait()
    assert told["metrics"]["steps"] == 2.0
    assert (told["metrics"]["done"], told["metrics"]["malformed"]) == (1.0, 0.0)
    check(running, told, 128)
    (row,) = running.query("SELECT count(*) AS calls FROM exchanges")
    assert row["calls"] == 256


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
