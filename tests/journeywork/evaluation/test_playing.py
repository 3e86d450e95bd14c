"""Entrants over a stub of the gateway: same tasks, paired differences, recorded results."""

from dataclasses import replace
from typing import Any

import anyio.to_thread
import pytest

from journeywork import EvaluationReport, Journeywork
from journeywork.evaluation.entrants import parse_entrant
from journeywork.evaluation.playing import play, task_name
from journeywork.statistics import mean_of, paired_difference
from journeywork.trajectory import Trajectory
from tests.kits.stub_gateway import StubGateway


@pytest.fixture
def stub() -> StubGateway:
    return StubGateway()


async def test_entrants_play_the_same_tasks_and_are_paired(stub: StubGateway) -> None:
    async def rollout(run: Trajectory, task: float) -> float | None:
        if task == 3.0:
            raise ZeroDivisionError("no luck")
        better = stub.opened[run.id]["pinned"] == "m@7"
        assert run.prompt == ("Be brief." if better else "")
        run.metrics["win"] = float(better and task > 1)
        return task + (0.5 if better else 0.0) + (0.1 if better and task == 2.0 else 0.0)

    tasks = [0.0, 1.0, 3.0, 2.0, 2.0]  # equal tasks are tasks of their own
    entrants = ["m", replace(parse_entrant("m@7"), prompt="Be brief.")]
    async with stub.client() as client:
        report = await play(client, entrants, tasks, rollout, attempts=2, max_exceptions=4, progress=False)
    assert {b["split"] for b in stub.opened.values()} == {"val"}
    assert {b["pinned"] for b in stub.opened.values()} == {"m@3", "m@7"}  # what `m` stood for
    assert len({b["group"] for b in stub.opened.values()}) == 10
    first, second = report.entrants
    assert (first.version, second.version) == ("m@3", "m@7")
    assert (first.runs, first.failed, len(first.errors)) == (10, 2, 2)
    assert report.measures == ["reward", "win"]
    assert report.difference(1, "reward") == paired_difference([0.0, 1.0, 2.0, 2.0], [0.5, 1.5, 2.6, 2.6])
    assert second.estimate("win").mean == 0.5  # two of four tasks; the failed one has no value
    assert first.usage.calls == 16  # the stub says 2 for each completed run
    assert [e["position"] for e in stub.evaluations] == [0, 1]
    told = stub.evaluations[1]
    assert (told["entrant"], told["model"], told["version"], told["prompt"]) == ("m@7", "m", "m@7", "Be brief.")
    (reward, win) = told["measures"]
    assert reward["difference"] == pytest.approx(0.55)
    assert (reward["pairs"], win["name"]) == (4, "win")
    assert told["tasks"][2] == {
        "task": "2",
        "reward": None,
        "metrics": {},
        "attempts": 2,
        "failed": 2,
        "trajectories": [b["id"] for b in stub.opened.values() if b["pinned"] == "m@7" and b["group"].endswith("-2-2")],
    }
    assert "difference" not in stub.evaluations[0]["measures"][0]


async def test_a_name_stands_for_the_version_of_the_beginning(stub: StubGateway) -> None:
    """The fault that was: while the first entrant played, the name of the second moved on to another version."""

    def rollout(run: Trajectory, task: int) -> float:
        stub.step = 9
        return 1.0

    async with stub.client() as client:
        report = await play(client, ["m@base", "m"], [1], rollout, progress=False)
    assert [entrant.version for entrant in report.entrants] == ["m@0", "m@3"]
    assert [b["pinned"] for b in stub.opened.values()] == ["m@0", "m@3"]


@pytest.mark.parametrize(
    ("entrants", "tasks", "said"),
    [
        ([], [1], "needs entrants with different names"),
        (["m@1", "m@1"], [1], "needs entrants with different names"),
        (["m@1"], [], "there are no tasks in the given list"),
        (["other"], [1], "the gateway has no model 'other'; it has: m"),
        (["m@44"], [1], "the gateway has no version 'm@44'; it has: m@0, …, m@2, m@3, .*, m@12"),
        (["m@x"], [1], "'m@x' is no entrant"),
    ],
)
async def test_what_can_t_be_played_is_said_so(
    stub: StubGateway, entrants: list[str], tasks: list[int], said: str
) -> None:
    async with stub.client() as client:
        with pytest.raises(ValueError, match=said):
            await play(client, entrants, tasks, lambda run, task: 1.0, progress=False)
    assert stub.opened == {}


async def test_a_blocking_client_evaluates(stub: StubGateway) -> None:
    """Half of the tasks have a share's interval, and one without a reward is left out."""

    def compare() -> EvaluationReport:
        with Journeywork(stub.url) as client:
            return client.evaluate(["m@7"], [0.0, 1.0, None, 1.0], lambda run, task: task, progress=False)

    async with stub.serving():
        (entrant,) = (await anyio.to_thread.run_sync(compare)).entrants
    assert entrant.estimate("reward") == mean_of([1.0, 1.0, 0.0])
    assert (entrant.unrewarded, entrant.failed) == (1, 0)


@pytest.mark.parametrize(
    ("task", "name"),
    [("a b\nc", "a b"), ({"id": "s-1"}, "s-1"), (type("T", (), {"id": 5})(), "5"), (3.0, "7"), ("x" * 300, "x" * 120)],
)
def test_a_task_has_a_name(task: Any, name: str) -> None:
    assert task_name(task, 7) == name
