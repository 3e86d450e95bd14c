"""Anchors, the alarm and `group.measured`."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from judge.labelled import LabelledGroup, read_labelled
from judge.monitor import JudgeMonitor
from judge.ruler.asking import JudgingError
from judge.ruler.ruler import LlmRuler
from pipeline.config import JudgeConfig
from pipeline.events import JudgeMeasured
from tests.judge.kit import Model, labelled, ruler, transcript
from tests.kits.scoring_server import Scorer


def monitoring(judge: LlmRuler, anchors: Sequence[LabelledGroup] = ()) -> tuple[JudgeMonitor, list[JudgeMeasured]]:
    """A monitor of one judge, and what it publishes."""
    published: list[JudgeMeasured] = []

    async def publish(event: JudgeMeasured) -> None:
        published.append(event)

    config = JudgeConfig(model="test/judge")
    return JudgeMonitor(config, {"ruler": judge}, anchors, publish, project="p", judge="j"), published


@pytest.mark.parametrize(("wrong", "alarm"), [(False, False), (True, True)])
async def test_the_alarm_is_raised_when_the_judge_disagrees_with_the_anchors(
    tmp_path: Path, wrong: bool, alarm: bool
) -> None:
    judge = ruler(Model(Scorer()))
    monitor, published = monitoring(judge, read_labelled(labelled(tmp_path / "anchors.jsonl", wrong=wrong)))
    await monitor.check_anchors("ruler", judge)
    await monitor.publish()
    (event,) = published  # nothing was judged but the anchors
    assert (event.kind, event.ruler, event.alarm, event.rubric) == ("anchors", "ruler", alarm, "general")
    assert event.kendall_tau == pytest.approx(-1.0 if wrong else 1.0)
    await judge.judge([transcript(f"t{i}", f"quality=0.{i + 1}") for i in range(3)])
    await monitor.publish()
    await monitor.publish()
    (_, event) = published
    assert (event.kind, event.groups, event.calls) == ("groups", 1, judge.statistics.usage.calls)
    assert (event.self_agreement, event.position_bias) == (1.0, pytest.approx(0.0, abs=1e-6))


async def test_a_judge_that_scores_nothing_is_measured_too(tmp_path: Path) -> None:
    """1,368 unreadable answers once left no trace outside of the judge's log."""
    judge = ruler(Model(lambda _: "I would rather not."), attempts=2)
    monitor, published = monitoring(judge, read_labelled(labelled(tmp_path / "anchors.jsonl")))
    for _ in range(2):
        with pytest.raises(JudgingError):
            await judge.judge([transcript(f"t{i}", "hm") for i in range(3)])
        await monitor.publish()
    counts = [(e.groups, e.recent_passes, e.recent_failed, e.calls) for e in published]
    assert counts == [(0, 2, 2, 4), (0, 2, 2, 8)]
    assert published[0].failure.startswith("the reply could not be read 2 times: score_")
    await monitor.check_anchors("ruler", judge)
    assert (published[2].alarm, published[2].groups, published[2].kendall_tau) == (True, 0, None)
