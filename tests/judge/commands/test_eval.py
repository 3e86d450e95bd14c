"""Labelled groups, agreement, `journeyman judge eval`, anchors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from judge.commands import cli as command
from judge.commands.eval import evaluate
from judge.commands.labelled import LabelledError, agreement, read_labelled
from judge.monitor import Watch
from pipeline.config import JudgeConfig
from pipeline.events import JudgeMeasured
from tests.judge.helpers import Model, ruler, transcript
from tests.kits.scoring_server import Scorer

pytestmark = pytest.mark.anyio


def labelled(path: Path, groups: int = 4, wrong: bool = False) -> Path:
    lines = []
    for number in range(groups):
        truth = [0.1 + 0.2 * i for i in range(4)]
        said = list(reversed(truth)) if wrong else truth
        entries = [
            {"messages": [{"role": "assistant", "content": f"quality={s:.1f}"}], "reward": t}
            for s, t in zip(said, truth, strict=True)
        ]
        shared = [{"role": "user", "content": f"task {number}"}]
        lines.append(json.dumps({"id": f"g{number}", "messages": shared, "trajectories": entries}))
    path.write_text("\n".join(lines) + "\n\n")
    return path


@pytest.mark.parametrize(
    ("truth", "scores", "tau", "pairwise", "flips"),
    [
        ([0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4], 1.0, 1.0, 0.0),
        ([0, 1, 2, 3], [0.4, 0.3, 0.2, 0.1], -1.0, 0.0, 1.0),
        ([0, 1, 2, 3], [0.5, 0.5, 0.5, 0.5], 0.0, 0.5, 0.0),
        ([0, 0, 1, 1], [0.1, 0.2, 0.9, 0.8], 4 / (4 * 6) ** 0.5, 1.0, 0.0),
        ([1, 1, 1, 1], [0.1, 0.2, 0.9, 0.8], 0.0, 0.0, 0.0),
        ([0, 1], [1.0, 0.0], -1.0, 0.0, 1.0),
    ],
)
def test_agreement(
    truth: list[float], scores: list[float], tau: float, pairwise: float, flips: float
) -> None:
    found = agreement([(dict(zip("abcd", truth, strict=False)), dict(zip("abcd", scores, strict=False)))])
    assert (found.kendall_tau, found.pairwise_accuracy, found.sign_flips) == pytest.approx(
        (tau, pairwise, flips)
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "there is no group in it"),
        ("{", "x.jsonl:1"),
        ('{"trajectories": []}', "at least 2"),
        ('{"trajectories": [{"messages": [], "reward": 1}, {"messages": []}]}', "reward"),
    ],
)
def test_a_labelled_file_that_can_t_be_used_says_where(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(LabelledError, match=why):
        read_labelled(tmp_path / "x.jsonl")


async def test_a_good_and_a_bad_judge_are_told_apart(tmp_path: Path) -> None:
    config = JudgeConfig(model="test/judge")
    good = await evaluate(config, read_labelled(labelled(tmp_path / "a")), Model(Scorer()))
    assert (good["groups"], good["kendall_tau"], good["pairwise_accuracy"], good["sign_flips"]) == (
        4,
        1.0,
        1.0,
        0.0,
    )
    assert good["cost_usd"] == pytest.approx(0.008)
    assert (good["calls"], good["self_agreement"], good["latency_p50_s"]) == (8, 1.0, 0.05)
    bad = await evaluate(config, read_labelled(labelled(tmp_path / "b", wrong=True)), Model(Scorer()))
    assert bad["kendall_tau"] == -1.0
    failing = await evaluate(config, read_labelled(tmp_path / "a"), Model(lambda _: 500))
    assert (failing["groups"], failing["failed"]) == (0, 4)


def test_the_command_reports_and_exits_by_the_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def make(config: JudgeConfig) -> AsyncIterator[Model]:
        yield Model(Scorer())

    monkeypatch.setattr("judge.commands.eval.open_judge_model", make)
    data = str(labelled(tmp_path / "x.jsonl"))
    command.main(["eval", data, "--set", "judge.model=test/judge", "--json", "--limit", "2"])
    assert json.loads(capsys.readouterr().out)["groups"] == 2
    with pytest.raises(SystemExit) as stop:
        command.main(["eval", data, "--set", "judge.model=test/judge", "--min-tau", "1.5"])
    assert stop.value.code == 1
    with pytest.raises(SystemExit) as stop:
        command.main(["eval", data])
    assert stop.value.code == 2
    assert "judge.model is not set" in capsys.readouterr().err


@pytest.mark.parametrize(("wrong", "alarm"), [(False, False), (True, True)])
async def test_anchors_raise_the_alarm_when_the_judge_leaves_the_truth(
    tmp_path: Path, wrong: bool, alarm: bool
) -> None:
    anchors = read_labelled(labelled(tmp_path / "anchors.jsonl", wrong=wrong))
    judge = ruler(Model(Scorer()))
    said: list[JudgeMeasured] = []

    async def publish(event: JudgeMeasured) -> None:
        said.append(event)

    path = tmp_path / "run" / "judge.json"
    watch = Watch(
        JudgeConfig(model="test/judge"), path, {"": judge}, anchors, publish, project="p", judge="j"
    )
    await watch.check("", judge)
    await watch.say()
    (event,) = said  # nothing was judged but the anchors
    assert (event.kind, event.ruler, event.alarm, event.rubric) == ("anchors", "default", alarm, "general")
    assert event.kendall_tau == pytest.approx(-1.0 if wrong else 1.0)
    await judge.judge([transcript(f"t{i}", f"quality=0.{i + 1}") for i in range(3)])
    await watch.say()
    await watch.say()
    (_, event) = said
    assert (event.kind, event.groups, event.calls) == ("groups", 1, judge.measured.calls)
    assert (event.self_agreement, event.position_bias) == (1.0, pytest.approx(0.0, abs=1e-6))
    watch.write()
    state: dict[str, Any] = msgspec.json.decode((tmp_path / "run" / "judge.json").read_bytes())
    assert (state["alarm"], state["anchors"][0]["kendall_tau"]) == (
        alarm,
        pytest.approx(-1.0 if wrong else 1.0),
    )
    assert state["rulers"]["default"]["rubric"] == "general"
    assert state["rulers"]["default"]["groups"] == 1  # anchors don't count as judged groups


async def test_anchors_that_can_t_be_judged_are_an_alarm_too(tmp_path: Path) -> None:
    anchors = read_labelled(labelled(tmp_path / "anchors.jsonl"))
    judge = ruler(Model(lambda _: 500))
    said: list[JudgeMeasured] = []

    async def publish(event: JudgeMeasured) -> None:
        said.append(event)

    watch = Watch(JudgeConfig(model="test/judge"), tmp_path / "judge.json", {"": judge}, anchors, publish)
    await watch.check("", judge)
    assert watch.anchor_runs[0]["alarm"]
    assert (said[0].alarm, said[0].groups, said[0].kendall_tau) == (True, 0, None)
