"""A run in sentences."""

import contextlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config, FeedbackConfig
from pipeline.events import AlarmChanged, Event, GroupScored, Measure
from pipeline.running.state import STATE, process_start
from store.showing.pages.history import History
from store.showing.pages.summary import summary
from tests.kits.events import loaded
from tests.store.kit import checkpoint, completed, discarded, evaluated, fill, promoted, run_of_one_step, scored

CHOSEN = {"model": "m", "branch": "main"}


def told(run_dir: Path, events: list[Event]) -> dict[str, Any]:
    fill(run_dir, *events)
    with contextlib.closing(History(Config(run_dir=str(run_dir)))) as history:
        return summary(history, CHOSEN, datetime(2026, 1, 1))


def compared(low: float, high: float) -> list[Event]:
    """An evaluation of two versions whose difference has these bounds."""
    mean = (low + high) / 2
    measure = Measure(name="reward", mean=mean, difference=mean, difference_low=low, difference_high=high, pairs=9)
    of: dict[str, Any] = {"evaluation": "e9", "runs": 9}
    return [evaluated("m@0", Measure(name="reward", mean=0.0), **of), evaluated("m@1", measure, position=1, **of)]


@pytest.mark.parametrize(
    ("low", "high", "verdict", "todo"),
    [
        (0.1, 0.3, "better", "Nothing needs to be done."),
        (-0.1, 0.3, "the difference may be chance", "Nothing needs to be done."),
        (-0.3, -0.1, "worse", "promote an older version"),
    ],
)
def test_the_gain_is_that_of_the_evaluation(tmp_path: Path, low: float, high: float, verdict: str, todo: str) -> None:
    steps = [event for event in run_of_one_step() if not isinstance(event, AlarmChanged)]
    page = told(tmp_path, [*steps, *compared(low, high)])
    assert page["sentences"][2].startswith("m@1 scores ")
    assert "against m@0 on 9 held-out tasks (95 % interval " in page["sentences"][2]
    assert page["sentences"][2].endswith(f": {verdict}).")
    assert todo in page["todo"]


def sampled(step: int, group: int, rewards: list[float], split: str = "train") -> Event:
    """A group whose runs a version sampled."""
    runs = {f"{split}{step}-{group}-{i}": reward for i, reward in enumerate(rewards)}
    member = {"split": split, "first_step": step, "last_step": step}
    return scored(f"{split}{step}-{group}", runs, member, split=split)


def test_without_an_evaluation_the_held_out_runs_say_it(tmp_path: Path) -> None:
    groups = [(step, group) for step in (0, 4) for group in range(3)]
    held = [sampled(step, group, [step + group + i / 10 for i in range(3)], "val") for step, group in groups]
    page = told(tmp_path, held)
    assert page["sentences"][2].startswith("m@4 scores +4.000 against m@0 on 3 held-out tasks")
    assert page["gain"]["low"] < 4 < page["gain"]["high"]


def test_an_empty_run_says_what_it_needs(tmp_path: Path) -> None:
    page = told(tmp_path, [])
    assert page["state"] == "unknown"
    assert page["sentences"][2:] == ["Nothing was measured on held-out tasks.", "No step was taken yet."]
    assert page["todo"].startswith("Send it work")


def test_a_running_run_names_what_is_not_ready_and_an_alarm_says_what_to_do(tmp_path: Path) -> None:
    this = {"pid": os.getpid(), "since": process_start(os.getpid())}
    services = {"trainer": {**this, "state": "starting"}, "store": {**this, "state": "ready"}}
    state = {**this, "urls": {}, "services": services}
    (tmp_path / STATE).write_text(json.dumps(state))
    page = told(tmp_path, run_of_one_step())
    assert page["sentences"][1] == "The run is running with 1 alarm: trainer is starting."
    assert page["todo"].startswith("Dead letters: `journeywork dead list`")
    (tmp_path / STATE).write_text(json.dumps(state | {"pid": 2**22 + 1}))
    assert told(tmp_path, [])["sentences"][1] == "The run is stopped with 1 alarm."


def rising(steps: int, *, size: int = 1) -> list[Event]:
    """16 runs of each version, alone in their groups or `size` together; the share that succeeds rises by 0.02 a
    step."""
    return [
        sampled(step, group, [float((i * 16 // size + group) / 16 < 0.4 + 0.02 * step) for i in range(size)])
        for step in range(steps + 1)
        for group in range(16 // size)
    ]


@pytest.mark.parametrize("size", [1, 4])
def test_the_first_sentence_says_whether_the_training_reward_moved(tmp_path: Path, size: int) -> None:
    """Without held-out tasks, and of runs without a group too."""
    rose, short = rising(20, size=size), rising(0, size=size)
    assert told(tmp_path / "empty", [])["sentences"][0] == "No training reward yet."
    assert told(tmp_path / "short", short)["sentences"][0].startswith("Training reward 0.438 in ")
    said = told(tmp_path / "rose", rose)["sentences"][0]
    assert said.startswith("Training reward 0.475 to 0.787 over 20 steps (95 % interval of the difference +0.")
    assert said.endswith(": it rose).")
    flat = [event for event in rose if isinstance(event, GroupScored) and event.members[0].first_step < 5]
    assert told(tmp_path / "flat", list(flat))["sentences"][0].endswith(": the difference may be chance).")


def test_runs_that_wait_for_feedback_are_said_to_wait(tmp_path: Path) -> None:
    """The fault that was: "Send it work" while runs waited for their results."""
    at = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1e6)
    ended = [completed(f"w{i}", group="", at=at + i * 1_000_000) for i in range(3)]
    fill(tmp_path, *ended, scored("w0", {"w0": 1.0}), discarded("w1", "validation", "w1"))
    config = Config(run_dir=str(tmp_path), feedback=FeedbackConfig(wait_s=600))
    with contextlib.closing(History(config)) as history:
        page = summary(history, CHOSEN, datetime(2026, 1, 1))
        assert page["sentences"][-1] == "1 run waits for feedback until 2026-01-01 00:10:02 UTC."
        assert page["waiting"]["runs"] == 1
        assert page["todo"] == "Nothing needs to be done."
        later = summary(history, CHOSEN, datetime(2026, 1, 2))
        assert later["sentences"][-1] == "1 run waits to be scored: for the other runs of a group, or for the judge."


@pytest.mark.parametrize(
    ("more", "todo"),
    [
        ([promoted("m@1")], "`journeywork eval m@1 m@2`"),
        ([promoted("m@2")], "Nothing needs to be done."),
        ([], "no inference server has loaded it"),
        ([loaded(2)], "Nothing needs to be done."),
        ([sampled(2, 0, [1.0], "val")], "Nothing needs to be done."),
    ],
)
def test_a_newest_version_that_is_neither_served_nor_measured_is_named(
    tmp_path: Path, more: list[Event], todo: str
) -> None:
    """The fault that was: "Nothing needs to be done"."""
    begun = [checkpoint(1, at=1), checkpoint(2, at=2), *compared(0.1, 0.3)]
    assert todo in told(tmp_path, [*begun, *more])["todo"]
