"""`journeywork watch` in a real terminal, and its lines without one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config, ModelConfig, save
from pipeline.events import CheckpointPublished
from pipeline.running.state import STATE
from store.reading.history import History
from store.showing.watch import curve, lines, main
from tests.kits.tmux import Terminal, needs_tmux
from tests.store.kit import checkpoint, fill, run_of_one_step

JOURNEYWORK = [sys.executable, "-m", "pipeline"]


def step(number: int, reward: float) -> CheckpointPublished:
    return checkpoint(number, metrics={"reward_mean_all": reward})


def make_run(folder: Path, events: list[Any]) -> Config:
    """A run directory with these events, as `journeywork up` leaves it while it runs as this process."""
    config = Config(run_dir=str(folder), models=(ModelConfig(name="m"), ModelConfig(name="other")))
    folder.mkdir(exist_ok=True)
    save(config, folder / "config.toml")
    fill(folder, events)
    services = {"store": {"pid": os.getpid(), "state": "ready"}}
    urls = {"gateway": "http://127.0.0.1:8700", "ui": "http://127.0.0.1:8701"}
    written = {"pid": os.getpid(), "urls": urls, "services": services, "alarms": ["no writes"]}
    (folder / STATE).write_text(json.dumps(written))
    return config


def test_it_says_what_the_overview_says(tmp_path: Path) -> None:
    steps = [step(number, number / 30) for number in range(2, 31)]
    with contextlib.closing(History(make_run(tmp_path, [*run_of_one_step(), *steps]))) as history:
        told = [line.plain for line in lines(history)]
    assert told[1].startswith("The run is running with 1 alarm")
    assert told[2].startswith("m: Step 30 was published ")
    assert told[3].startswith("reward 1.000 ")
    assert told[3].endswith("█")
    assert told[5].startswith("runs 2 of 2, calls 4, groups scored 1, discarded 1, dead letters 1, judge $")
    assert told[6] == "other: No step was taken yet."
    assert told[10] == "ALARM no writes", "the supervisor's own"
    assert told[11].startswith("ALARM Dead letters: ")
    assert told[12].startswith("What to do: Dead letters: journeywork dead list")
    assert told[13] == "dashboard http://127.0.0.1:8701"


def test_a_curve_goes_from_the_lowest_block_to_the_highest() -> None:
    assert curve([0.0, 1.0, 2.0, 3.0]) == "▁▃▆█"
    assert curve([0.5]) == "▁"


@needs_tmux
def test_the_view_is_live_in_a_terminal(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, [step(1, 0.0)])
    command = [*JOURNEYWORK, "watch", "--every", "0.2", "--run-dir", str(run)]
    with Terminal(tmp_path, 80, 24, command) as terminal:
        terminal.until(lambda text: "m: Step 1 was published" in text and "dashboard http" in text)
        fill(run, [step(2, 0.5)])
        terminal.until(lambda text: "m: Step 2 was published" in text and "reward 0.500 ▁█" in text)
        terminal.resize(40, 6)
        terminal.until(lambda text: len(text.split("\n")) == 6 and "running" in text)
        terminal.keys("C-c")
        left = terminal.until(lambda text: "ended with 0" in text)
        assert "Step" not in "\n".join(left), "the screen is given back"


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_without_a_terminal_there_are_lines(tmp_path: Path, end: signal.Signals) -> None:
    make_run(tmp_path, [step(1, 0.5)])
    command = [*JOURNEYWORK, "watch", "--every", "0.1", "--run-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [process.stdout.readline() for _ in range(2)]
        process.send_signal(end)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    for line in told:
        assert " | reward 0.500 ▁ | " in line
        assert "\x1b" not in line


def test_a_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run-dir", str(tmp_path / "nowhere")]) == 2
    assert "is no run" in capsys.readouterr().err
    make_run(tmp_path, [])
    assert main(["--every", "0", "--run-dir", str(tmp_path)]) == 2
