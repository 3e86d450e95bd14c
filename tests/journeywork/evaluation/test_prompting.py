"""`journeywork prompt`: GEPA plays the user's tasks, and the evaluation holds the first prompt and the best."""

import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from journeywork.evaluation import prompting
from journeywork.trajectory import Trajectory
from tests.kits.scoring_server import ScoringServer
from tests.kits.stub_gateway import StubGateway

TASKS, HELD_OUT = ["a", "b", "c"], [f"h{number}" for number in range(12)]
GOOD = "Answer in one word."


def rollout(run: Trajectory, task: str) -> float:
    """Better with the good prompt."""
    run.metrics["length"] = float(len(run.prompt))
    if task == "b" and run.prompt != GOOD:
        raise ZeroDivisionError
    run.metadata["answer"] = f"{task}, perhaps"
    return 1.0 if run.prompt == GOOD else 0.25


@dataclass
class Batch:
    outputs: list[Any]
    scores: list[float]
    trajectories: list[Any] | None


def optimize_once(**options: Any) -> Any:
    """As GEPA: play the first prompt, tell the writer of it, play what it writes, keep the better one."""
    first, tasks, adapter = options["seed_candidate"], options["trainset"], options["adapter"]
    before = adapter.evaluate(tasks, first, capture_traces=True)
    told = adapter.make_reflective_dataset(first, before, ["prompt"])
    second = {"prompt": options["reflection_lm"](json.dumps(told))}
    after = adapter.evaluate(tasks, second)
    best = second if sum(after.scores) > sum(before.scores) else first
    return types.SimpleNamespace(best_candidate=best)


@pytest.fixture
def gepa(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of GEPA's that the command makes, without the package, which the tests' environment does not have."""
    package, core, adapter = (types.ModuleType(name) for name in ("gepa", "gepa.core", "gepa.core.adapter"))
    package.__dict__["optimize"], adapter.__dict__["EvaluationBatch"] = optimize_once, Batch
    for module in (package, core, adapter):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def improved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], written: str, *more: str
) -> tuple[Any, StubGateway, Any]:
    """Run the command over a stub of the gateway; its answer, the stub, and the requests to the writer."""
    stub, writer = StubGateway(), ScoringServer(lambda request: written, keep=True)
    (tmp_path / "first.txt").write_text("Play.")
    here = f"{__name__}:"

    async def run() -> None:
        async with stub.serving(), writer.run():
            arguments = ["m", "--prompt", str(tmp_path / "first.txt"), "--rollout", f"{here}rollout", "--json"]
            arguments += ["--scenarios", f"{here}TASKS", "--held-out", f"{here}HELD_OUT", "--url", stub.url]
            arguments += [
                "--by",
                f"{writer.url}#writer",
                "--max-exceptions",
                "1000",
                "--out",
                str(tmp_path / "best.txt"),
            ]
            await anyio.to_thread.run_sync(prompting.main, [*arguments, *more])

    anyio.run(run)
    return json.loads(capsys.readouterr().out), stub, writer.requests


@pytest.mark.usefixtures("gepa")
def test_the_best_prompt_is_compared_with_the_first_on_held_out_tasks_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer, stub, asked = improved(tmp_path, capsys, GOOD)
    assert answer["better"] is True
    assert (tmp_path / "best.txt").read_text() == GOOD
    assert [told["prompt"] for told in stub.evaluations] == ["Play.", GOOD]
    assert [told["version"] for told in stub.evaluations] == ["m@3", "m@3"]
    (reward,) = [measure for measure in stub.evaluations[1]["measures"] if measure["name"] == "reward"]
    assert (reward["mean"], reward["difference"], reward["pairs"]) == (1.0, 0.75, 12)
    assert {opened["split"] for opened in stub.opened.values()} == {"val"}
    ((request,), told) = asked, json.loads(asked[0]["messages"][0]["content"])["prompt"]
    assert request["model"] == "writer"
    said = [{"answer": "a, perhaps"}]
    assert told[0] == {"Inputs": "a", "Generated Outputs": said, "Feedback": "length: 5; reward: 0.25"}
    assert told[1] == {"Inputs": "b", "Feedback": "The attempt ended with an error."}


@pytest.mark.usefixtures("gepa")
def test_a_prompt_that_is_no_better_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer, stub, _ = improved(tmp_path, capsys, "Play better.")
    assert answer["better"] is False
    assert not (tmp_path / "best.txt").exists()
    assert [told["prompt"] for told in stub.evaluations] == ["Play."]


def test_gepa_itself_takes_the_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gepa")
    answer, stub, asked = improved(tmp_path, capsys, f"```\n{GOOD}\n```", "--runs", "30")
    assert answer["better"] is True
    assert stub.evaluations[1]["prompt"] == GOOD
    assert asked


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"--by": "m"}, "write <base URL>#<model>"), ({"--key-env": "NOT_SET_ANYWHERE"}, "is not set")],
)
def test_arguments_that_cannot_be_used(changed: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--prompt": "p", "--rollout": "m:f", "--scenarios": "m:s", "--held-out": "m:h", "--by": "http://h/v1#w"}
    arguments = [text for pair in {**given, **changed}.items() for text in pair]
    with pytest.raises(SystemExit) as caught:
        prompting.main(["m", *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
