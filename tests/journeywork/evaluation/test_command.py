"""`journeywork eval` as a program: a pinned version and a server by URL, on one log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from journeywork.evaluation.command import main
from pipeline.events import PolicyEvaluated, TrajectoryCompleted
from pipeline.log.broker import Broker
from store.reading import sql
from tests.conftest import VllmServer
from tests.kits.stub_gateway import StubGateway
from tests.rollout_gateway.conftest import PROJECT, GatewayProcess
from tests.store.kit import fill

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
KIT = "tests.journeywork.evaluation.kit"
PLAYED = ["--rollout", f"{KIT}:play", "--scenarios", f"{KIT}:held_out"]


def evaluate(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline", "eval", *PLAYED, *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, **env})


@pytest.mark.slow
async def test_versions_and_models_of_others_play_the_same_tasks(
    gateway: GatewayProcess, inference_double: VllmServer, tmp_path: Path
) -> None:
    server, served = f"{inference_double.url}/v1", f"{inference_double.model}@0"
    entrants = ["tictactoe@0", "tictactoe", f"{server}#{served}"]
    done = evaluate(*entrants, "--url", gateway.url, "--attempts", "2", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [e["entrant"] for e in told["entrants"]] == entrants
    assert [e["version"] for e in told["entrants"]] == ["tictactoe@0", "tictactoe@0", ""]
    assert [(e["runs"], e["failed"], e["calls"]) for e in told["entrants"]] == [(6, 0, 6)] * 2 + [(6, 0, 0)]
    assert all(e["prompt_tokens"] > 0 < e["completion_tokens"] and e["call_s"] > 0 for e in told["entrants"][:2])

    async with Broker.connect(gateway.config.nats, name="test") as broker:
        events: list[Any] = [r.event for r in await broker.read(PolicyEvaluated, project=PROJECT)]
        runs = [r.event for r in await broker.read(TrajectoryCompleted, project=PROJECT)]
    assert [(e.entrant, e.position) for e in events] == [(name, n) for n, name in enumerate(entrants)]
    assert len(runs) == 12
    assert {r.split for r in runs} == {"val"}
    assert {t for e in events for task in e.tasks for t in task.trajectories} == {r.trajectory for r in runs}
    fill(tmp_path, [*runs, *events])
    with sql.connect(tmp_path) as connection:
        rows = connection.sql(
            "SELECT entrant, measure, mean, pairs FROM evaluations ORDER BY position, measure"
        ).fetchall()
        assert [row[:2] for row in rows] == [(e, m) for e in entrants for m in ("reward", "short")]
        assert [row[3] for row in rows] == [0, 0, *[3] * 4]
        (mean,) = connection.sql(
            "SELECT avg(t.reward) FROM evaluation_tasks e, unnest(e.trajectories) AS u(name) "
            "JOIN trajectories t ON t.trajectory = u.name WHERE e.position = 0"
        ).fetchall()[0]
        assert mean == pytest.approx(rows[0][2])


def test_what_a_rollout_prints_is_no_part_of_the_json() -> None:
    entrant = "http://127.0.0.1:9/v1#m"
    done = evaluate(entrant, "--rollout", f"{KIT}:chatter", "--no-record", "--json")
    assert done.returncode == 0, done.stderr
    (played,) = json.loads(done.stdout)["entrants"]
    assert (played["entrant"], played["runs"]) == (entrant, 3)
    for printed in ("playing a1=x", "from a library", "from a program"):
        assert printed in done.stderr


def test_a_dry_run_plays_nothing(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stub = StubGateway(step=3)
    monkeypatch.setattr("journeywork.command_line.client_of", lambda *_: stub.client())
    asked = [*PLAYED, "--url", "http://127.0.0.1:9", "--dry-run"]
    main([*asked, "m", "http://127.0.0.1:9/v1#m"])
    plan = json.loads(capfd.readouterr().out)
    assert plan == {"tasks": 3, "versions": {"m": "m@3", "http://127.0.0.1:9/v1#m": ""}}
    assert not stub.opened
    for wrong, said in (
        (["x"], "no model 'x'"),
        (["m", "m"], "different names"),
        (["--scenarios", f"{KIT}:NONE", "m"], "no tasks in"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*asked, *wrong])
        assert ended.value.code == 2
        assert said in capfd.readouterr().err


def test_an_evaluation_without_a_reward_fails(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["http://127.0.0.1:9/v1#m", "--rollout", f"{KIT}:forget", "--scenarios", f"{KIT}:held_out"]
    with pytest.raises(SystemExit) as ended:
        main([*args, "--no-record"])
    assert ended.value.code == 1
    told = capsys.readouterr()
    assert "no task has a reward for http://127.0.0.1:9/v1#m: " in told.err
    assert "3 of 3 tasks have no reward" in told.out
