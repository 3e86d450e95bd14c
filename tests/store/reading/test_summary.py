"""A run in four sentences."""

from __future__ import annotations

import contextlib
import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.events import AlarmChanged, Event, Measure, PolicyEvaluated
from pipeline.running.state import STATE, process_start
from store.reading.history import History
from store.reading.summary import summary
from tests.store.kit import fill, run_of_one_step, scored

CHOSEN = {"model": "m", "branch": "main"}


def told(run_dir: Path, events: list[Event]) -> dict[str, Any]:
    fill(run_dir, events)
    with contextlib.closing(History(Config(run_dir=str(run_dir)))) as history:
        return summary(history, CHOSEN, datetime(2026, 1, 1))


def evaluated(low: float, high: float) -> list[Event]:
    """An evaluation of two versions whose difference has these bounds."""
    mean = (low + high) / 2
    measures = Measure(name="reward", mean=mean, count=9, difference=mean, difference_low=low, difference_high=high,
                       pairs=9)  # fmt: skip
    of = {"project": "p", "evaluation": "e9", "model": "m", "runs": 9}
    return [
        PolicyEvaluated(**of, position=0, entrant="m@0", version="m@0", measures=(Measure(name="reward", mean=0.0),)),
        PolicyEvaluated(**of, position=1, entrant="m@1", version="m@1", measures=(measures,)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "verdict", "todo"),
    [
        (0.1, 0.3, "better", "Nothing needs to be done."),
        (-0.1, 0.3, "the difference may be chance", "Nothing needs to be done."),
        (-0.3, -0.1, "worse", "promote an older version"),
    ],
)
def test_the_gain_is_that_of_the_evaluation(
    tmp_path: Path, low: float, high: float, verdict: str, todo: str
) -> None:
    steps = [event for event in run_of_one_step() if not isinstance(event, AlarmChanged)]
    page = told(tmp_path, [*steps, *evaluated(low, high)])
    assert page["sentences"][1].startswith("m@1 scores ")
    assert "against m@0 on 9 held-out tasks (95 % interval " in page["sentences"][1]
    assert page["sentences"][1].endswith(f": {verdict}).")
    assert todo in page["todo"]


def test_without_an_evaluation_the_held_out_runs_say_it(tmp_path: Path) -> None:
    held: list[Event] = [
        scored(
            f"v{step}-{group}", {f"v{step}-{group}-{i}": step + group + i / 10 for i in range(3)},
            {"split": "val", "first_step": step, "last_step": step}, split="val",
        )
        for step in (0, 4)
        for group in range(3)
    ]  # fmt: skip
    page = told(tmp_path, held)
    assert page["sentences"][1].startswith("m@4 scores +4.000 against m@0 on 3 held-out tasks")
    assert page["gain"]["low"] < 4 < page["gain"]["high"]


def test_an_empty_run_says_what_it_needs(tmp_path: Path) -> None:
    page = told(tmp_path, [])
    assert page["state"] == "unknown"
    assert page["sentences"][1:] == ["Nothing was measured on held-out tasks.", "No step was taken yet."]
    assert page["todo"].startswith("Send it work")


def test_the_first_alarm_is_a_cause_and_not_a_consequence(tmp_path: Path) -> None:
    raised: list[Event] = [
        AlarmChanged(project="p", alarm=name, state="raised", since=since)
        for since, name in enumerate(("nothing_trains", "starvation"), 1)
    ]
    page = told(tmp_path, raised)
    assert [alarm["alarm"] for alarm in page["alarms"]] == ["nothing_trains", "starvation"]
    assert page["todo"].startswith("Nothing trains: ")


def test_a_running_run_names_what_is_not_ready_and_an_alarm_says_what_to_do(tmp_path: Path) -> None:
    this = {"pid": os.getpid(), "since": process_start(os.getpid())}
    services = {
        "trainer": {**this, "state": "starting"},
        "store": {**this, "state": "ready"},
    }
    state = {**this, "urls": {}, "services": services}
    (tmp_path / STATE).write_text(json.dumps(state))
    page = told(tmp_path, run_of_one_step())
    assert page["sentences"][0] == "The run is running with 1 alarm: trainer is starting."
    assert page["todo"].startswith("Dead letters: `journeywork dead list`")
    (tmp_path / STATE).write_text(json.dumps(state | {"pid": 2**22 + 1}))
    assert told(tmp_path, [])["sentences"][0] == "The run is stopped with 1 alarm."
