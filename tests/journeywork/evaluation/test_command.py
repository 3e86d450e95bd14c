"""`journeywork eval` as a program: a pinned version and the one that its name stands for, on one log."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from journeywork.evaluation.command import main
from pipeline.events import PolicyEvaluated, TrajectoryCompleted
from pipeline.log.broker import Broker
from store.reading import sql
from tests.kits.stub_gateway import StubGateway
from tests.rollout_gateway.conftest import PROJECT, GatewayProcess
from tests.store.kit import fill

ROOT = Path(__file__).parents[3]
KIT = "tests.journeywork.evaluation.kit"
PLAYED = ["--rollout", f"{KIT}:play", "--scenarios", f"{KIT}:held_out"]


def evaluate(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline", "eval", *PLAYED, *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, **env})


@pytest.mark.slow
async def test_entrants_play_the_same_tasks_and_are_recorded(gateway: GatewayProcess, tmp_path: Path) -> None:
    entrants = ["tictactoe@0", "tictactoe"]
    done = evaluate(*entrants, "--url", gateway.url, "--attempts", "2", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [e["entrant"] for e in told["entrants"]] == entrants
    assert [e["version"] for e in told["entrants"]] == ["tictactoe@0", "tictactoe@0"]
    assert [(e["runs"], e["failed"], e["calls"]) for e in told["entrants"]] == [(6, 0, 6)] * 2
    assert all(e["prompt_tokens"] > 0 < e["completion_tokens"] and e["call_s"] > 0 for e in told["entrants"])

    async with Broker.connect(gateway.config.nats, name="test") as broker:
        events: list[Any] = [r.event for r in await broker.read(PolicyEvaluated, project=PROJECT)]
        runs = [r.event for r in await broker.read(TrajectoryCompleted, project=PROJECT)]
    assert [(e.entrant, e.position) for e in events] == [(name, n) for n, name in enumerate(entrants)]
    assert len(runs) == 12
    assert {r.split for r in runs} == {"val"}
    assert {t for e in events for task in e.tasks for t in task.trajectories} == {r.trajectory for r in runs}
    fill(tmp_path, *runs, *events)
    with sql.connect(tmp_path) as connection:
        rows = connection.sql(
            "SELECT entrant, measure, mean, pairs FROM evaluations ORDER BY position, measure"
        ).fetchall()
        assert [row[:2] for row in rows] == [(e, m) for e in entrants for m in ("reward", "short")]
        assert [row[3] for row in rows] == [0, 0, 3, 3]
        (mean,) = connection.sql(
            "SELECT avg(t.reward) FROM evaluation_tasks e, unnest(e.trajectories) AS u(name) "
            "JOIN trajectories t ON t.trajectory = u.name WHERE e.position = 0"
        ).fetchall()[0]
        assert mean == pytest.approx(rows[0][2])


async def test_what_a_rollout_prints_is_no_part_of_the_json() -> None:
    stub = StubGateway()
    async with stub.serving():
        done = await anyio.to_thread.run_sync(
            lambda: evaluate("m", "--rollout", f"{KIT}:chatter", "--url", stub.url, "--json")
        )
    assert done.returncode == 0, done.stderr
    (played,) = json.loads(done.stdout)["entrants"]
    assert (played["entrant"], played["runs"]) == ("m", 3)
    for printed in ("playing a1=x", "from a library", "from a program"):
        assert printed in done.stderr


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubGateway:
    """The gateway that the command asks, without a network."""
    gateway = StubGateway(step=3)
    monkeypatch.setattr("journeywork.command_line.client_of", lambda _: gateway.client())
    return gateway


def test_a_dry_run_plays_nothing(stub: StubGateway, capfd: pytest.CaptureFixture[str]) -> None:
    asked = [*PLAYED, "--dry-run"]
    main([*asked, "m", "m@2"])
    assert json.loads(capfd.readouterr().out) == {"tasks": 3, "versions": {"m": "m@3", "m@2": "m@2"}}
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


@pytest.mark.usefixtures("stub")
def test_an_evaluation_without_a_reward_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["m", "--rollout", f"{KIT}:forget", "--scenarios", f"{KIT}:held_out"])
    assert ended.value.code == 1
    told = capsys.readouterr()
    assert "no task has a reward for m: " in told.err
    assert "3 of 3 tasks have no reward" in told.out
