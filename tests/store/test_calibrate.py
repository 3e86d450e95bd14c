"""`journeywork calibrate`: from people's labels to a judge's calibration, anchors, and what would change by it."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest

from judge.labelled import read_labelled
from pipeline.calibration import read_calibration
from pipeline.config import Config, ConfigError, JudgeConfig, NatsConfig, RewardConfig
from pipeline.events import (
    Event,
    GroupScored,
    JudgeCalibrated,
    Member,
    Score,
    SignalGiven,
    TrajectoryCompleted,
    Verdict,
    pack_seqs,
)
from pipeline.log.broker import Broker
from store.commands import calibrate, diff
from store.reading import sql
from tests.store.kit import checkpoint, exchange, fill

GENEROUS = 0.8, 0.84, 0.88, 1.0
"""A judge's scores of four runs, of which people think as in `TRUTH`."""
TRUTH = 0.0, 0.1, 0.2, 1.0


def judged(
    number: int, scores: tuple[float, ...] = GENEROUS, labels: tuple[float, ...] = TRUTH
) -> list[Event]:
    """A group of four runs that a judge scored and a person labelled; scores vary a little between groups."""
    names = [f"g{number}-{i}" for i in range(4)]
    near = [score - 0.001 * number for score in scores]
    verdict = Verdict(
        judge_model="x", rubric="general", rubric_hash="h", order=tuple(names),
        scores=tuple(Score(trajectory=t, score=s) for t, s in zip(names, near, strict=True)),
    )  # fmt: skip
    members = tuple(
        Member(trajectory=t, reward=s, components={"ruler": s}) for t, s in zip(names, near, strict=True)
    )
    return [
        *(exchange(t, group=f"g{number}") for t in names),
        *(TrajectoryCompleted(project="p", trajectory=t, model="m", group=f"g{number}", exchanges=1) for t in names),
        GroupScored(project="p", group=f"g{number}", model="m", judge="j", members=members, verdicts=(verdict,)),
        *(
            SignalGiven(project="p", signal=f"me:{t}", trajectory=t, model="m", group=f"g{number}", name="label",
                        value=label, by="me", source="dashboard")
            for t, label in zip(names, labels, strict=True)
        ),
    ]  # fmt: skip


def labelled(folder: Path, count: int = 6) -> Config:
    fill(folder, [event for number in range(count) for event in judged(number)])
    return Config(project="p", run_dir=str(folder))


def test_a_generous_judge_is_calibrated_to_what_people_say(tmp_path: Path) -> None:
    config = labelled(tmp_path)
    with sql.connect(config) as connection:
        event = calibrate.calibrate(connection, config)
    assert (event.reward, event.rubric, event.rubric_hash, event.runs, event.groups) == (
        "ruler",
        "general",
        "h",
        24,
        6,
    )
    assert event.error_after < 0.001 < 0.3 < event.error_before
    assert event.labels == pytest.approx(TRUTH)


def test_too_few_labels_and_a_judge_that_needs_none_are_refused(tmp_path: Path) -> None:
    few = labelled(tmp_path / "few", 4)
    with sql.connect(few) as connection, pytest.raises(ConfigError, match="16 runs of 4 groups have a label"):
        calibrate.calibrate(connection, few)
    agrees = Config(project="p", run_dir=str(tmp_path / "agrees"))
    scores = 0.1, 0.3, 0.6, 0.9
    fill(
        tmp_path / "agrees",
        [e for n in range(6) for e in judged(n, scores, tuple(s - 0.001 * n for s in scores))],
    )
    with sql.connect(agrees) as connection, pytest.raises(ConfigError, match="needs no calibration"):
        calibrate.calibrate(connection, agrees)


def test_the_reward_of_a_composed_judge_is_named() -> None:
    style = RewardConfig(name="style", kind="ruler", rubric="rubrics/style.md")
    both = JudgeConfig(
        model="x", rewards=(style, RewardConfig(name="facts", kind="ruler"), RewardConfig(name="win"))
    )
    assert calibrate.ruler_of(both, "style") == ("style", "style")
    assert calibrate.ruler_of(both, "facts") == ("facts", "general")
    with pytest.raises(ConfigError, match="style, facts"):
        calibrate.ruler_of(both)


def test_the_newest_label_of_each_person_counts_and_people_are_averaged(tmp_path: Path) -> None:
    config = labelled(tmp_path)
    again = [
        SignalGiven(project="p", signal=f"{who}:{n}", trajectory="g0-0", model="m", group="g0", name="label",
                    value=value, by=who, source="api", at=10**16 + n)
        for n, (who, value) in enumerate((("me", 0.25), ("you", 0.75)))
    ]  # fmt: skip
    fill(tmp_path, list(again))
    with sql.connect(config) as connection:
        rows = connection.execute(calibrate._PAIRS, {"project": "p", "rubric": "general"}).fetchall()
    assert [label for group, score, label, _ in rows if score == 0.8] == [0.5]


@pytest.mark.anyio
async def test_the_command_writes_a_file_and_records_what_it_wrote(
    broker: Broker, nats_config: NatsConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    labelled(tmp_path / "run")
    settings = tmp_path / "c.toml"
    settings.write_text(f'project = "p"\nrun_dir = "{tmp_path}/run"\n[nats]\nurl = "{nats_config.url}"\n')
    out = tmp_path / "calibration.json"
    code = await anyio.to_thread.run_sync(calibrate.main, ["--config", str(settings), "--out", str(out)])
    assert code == 0, capfd.readouterr().err
    (recorded,) = await broker.read(JudgeCalibrated)
    assert read_calibration(str(out)).id == recorded.event.calibration
    assert (
        f"calibration {recorded.event.calibration} of ruler from 24 labelled runs" in capfd.readouterr().out
    )


def test_labelled_groups_become_anchors_once(tmp_path: Path) -> None:
    config, file = labelled(tmp_path, 2), tmp_path / "anchors.jsonl"
    fill(tmp_path, judged(7, labels=(0.5, 0.5, 0.5, 0.5)))  # nothing to compare
    file.write_text(
        '{"id": "mine", "task": "a\u2028b", "trajectories": [{"reward": 1}, {"reward": 0}]}\n', "utf-8"
    )
    with sql.connect(config) as connection:
        assert calibrate.add_anchors(connection, config, file) == 2
        assert calibrate.add_anchors(connection, config, file) == 0
    mine, first, _ = read_labelled(file)
    assert (mine.id, first.id) == ("mine", "g0")
    assert sorted(first.rewards.values()) == sorted(TRUTH)
    (conversation,) = first.transcripts[0].conversations
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant"]


@pytest.mark.parametrize("unlabelled", [False, True])
def test_anchors_without_different_labels_are_an_error_that_says_where_labels_come_from(
    unlabelled: bool, tmp_path: Path
) -> None:
    config, file = Config(project="p", run_dir=str(tmp_path)), tmp_path / "anchors.jsonl"
    events = judged(7, labels=(0.5, 0.5, 0.5, 0.5))
    fill(tmp_path, [e for e in events if not (unlabelled and isinstance(e, SignalGiven))])
    with sql.connect(config) as connection, pytest.raises(ConfigError, match="label runs on the dashboard"):
        calibrate.add_anchors(connection, config, file)
    assert not file.exists()


def test_diff_says_which_advantages_a_calibration_turns_and_which_checkpoints_rest_on_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The mean of 0.8, 0.84, 0.88 and 1.0 is 0.88: the third run is at the mean. With people's labels it is below."""
    config = labelled(tmp_path)
    with sql.connect(config) as connection:
        event = calibrate.calibrate(connection, config)
    lower = judged(9, (0.8, 0.84, 0.89, 1.0))  # here it is above
    fill(tmp_path, [*lower, event])
    fill(
        tmp_path,
        [
            checkpoint(1, groups=("g0",), group_seqs=pack_seqs([1])),
            checkpoint(2, groups=("g1", "g9"), group_seqs=pack_seqs([2, 7])),
        ],
    )
    sides = [
        "--a",
        "branch=main",
        "--b",
        f"branch=main,calibration={event.calibration}",
        "--run-dir",
        str(tmp_path),
    ]
    assert diff.main([*sides, "--format", "json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert (said["groups"], said["sign_flips"]) == (7, 1)
    assert said["flipped"] == [{"project": "p", "model": "m", "group_id": "g9", "trajectories": ["g9-2"]}]
    assert said["checkpoints"] == [{"project": "p", "version": "m@2", "flipped": 1, "trajectories": 8}]
    assert diff.main(sides) == 0
    assert "p/m@2 was trained on 1 of them, of 8 trajectories" in capfd.readouterr().out
    assert diff.main([*sides[:3], "calibration=none", *sides[4:]]) == 2
    assert "holds no calibration 'none'" in capfd.readouterr().err
