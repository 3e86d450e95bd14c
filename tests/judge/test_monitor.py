"""Anchors, the alarm and `group.measured`."""

from __future__ import annotations

from pathlib import Path

import pytest

from judge.labelled import read_labelled
from judge.monitor import JudgeMonitor
from judge.ruler.asking import JudgingError
from pipeline.config import JudgeConfig
from pipeline.events import JudgeMeasured
from tests.judge.kit import Model, labelled, ruler, transcript
from tests.kits.scoring_server import Scorer

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("wrong", "alarm"), [(False, False), (True, True)])
async def test_the_alarm_is_raised_when_the_judge_disagrees_with_the_anchors(
    tmp_path: Path, wrong: bool, alarm: bool
) -> None:
    anchors = read_labelled(labelled(tmp_path / "anchors.jsonl", wrong=wrong))
    judge = ruler(Model(Scorer()))
    said: list[JudgeMeasured] = []

    async def publish(event: JudgeMeasured) -> None:
        said.append(event)

    monitor = JudgeMonitor(JudgeConfig(model="test/judge"), {"": judge}, anchors, publish, project="p", judge="j")
    await monitor.check_anchors("", judge)
    await monitor.publish()
    (event,) = said  # nothing was judged but the anchors
    assert (event.kind, event.ruler, event.alarm, event.rubric) == ("anchors", "default", alarm, "general")
    assert event.kendall_tau == pytest.approx(-1.0 if wrong else 1.0)
    await judge.judge([transcript(f"t{i}", f"quality=0.{i + 1}") for i in range(3)])
    await monitor.publish()
    await monitor.publish()
    (_, event) = said
    assert (event.kind, event.groups, event.calls) == ("groups", 1, judge.statistics.usage.calls)
    assert (event.self_agreement, event.position_bias) == (1.0, pytest.approx(0.0, abs=1e-6))


async def test_a_judge_that_scores_nothing_is_measured_too() -> None:
    """1,368 unreadable answers once left no trace outside of the judge's log."""
    judge = ruler(Model(lambda _: "I would rather not."), attempts=2)
    said: list[JudgeMeasured] = []

    async def publish(event: JudgeMeasured) -> None:
        said.append(event)

    monitor = JudgeMonitor(JudgeConfig(model="test/judge"), {"": judge}, [], publish)
    for _ in range(2):
        with pytest.raises(JudgingError):
            await judge.judge([transcript(f"t{i}", "hm") for i in range(3)])
        await monitor.publish()
    assert [(e.groups, e.recent_passes, e.recent_failed, e.calls) for e in said] == [(0, 2, 2, 4), (0, 2, 2, 8)]
    assert said[0].failure == "unreadable"


async def test_the_alarm_is_raised_when_no_anchor_could_be_judged(tmp_path: Path) -> None:
    anchors = read_labelled(labelled(tmp_path / "anchors.jsonl"))
    judge = ruler(Model(lambda _: 500))
    said: list[JudgeMeasured] = []

    async def publish(event: JudgeMeasured) -> None:
        said.append(event)

    monitor = JudgeMonitor(JudgeConfig(model="test/judge"), {"": judge}, anchors, publish)
    await monitor.check_anchors("", judge)
    assert (said[0].alarm, said[0].groups, said[0].kendall_tau) == (True, 0, None)
