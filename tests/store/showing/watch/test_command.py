"""`journeywork watch` and the view of `journeywork up` in a real terminal, and their lines without one."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from store.showing.watch.command import main
from tests.kits.tmux import Terminal, needs_tmux
from tests.store.kit import fill
from tests.store.showing.watch.kit import events, loaded, make_run, step

JOURNEYWORK = [sys.executable, "-m", "pipeline"]


@needs_tmux
@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_the_view_is_live_in_a_terminal(width: int, height: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, events())
    command = [*JOURNEYWORK, "watch", "--every", "0.2", "--run-dir", str(run)]
    with Terminal(tmp_path, width, height, command) as terminal:
        shown = terminal.until(lambda text: "\ndashboard http://127.0.0.1:8701" in text)
        assert len(shown) == height
        assert shown[0].startswith("journeywork ")
        assert "/run" in shown[0]
        told = "\n".join(shown)
        for part in (
            "gateway ready",
            "rollouts/s",
            "open groups 1",
            "stream lag",
            "staleness 0.25",
            "dead letters 1",
        ):
            assert part in told
        assert "! Rise of KL of m: it is far" in told
        assert sum("█" in line for line in shown) >= 3, "the curve"
        # A further step appears while it runs.
        fill(run, [*[step(i, 0.5) for i in range(1, 32)], loaded(31)])
        terminal.until(lambda text: "m@31 reward 0.500" in text and "8000 m@31" in text)
        terminal.resize(width - 20, height - 4)
        terminal.until(
            lambda text: len(lines := text.split("\n")) == height - 4 and lines[-1].startswith("dash")
        )
        terminal.keys("C-c")
        left = terminal.until(lambda text: "ended with 0" in text)
        assert "rollouts/s" not in "\n".join(left), "the screen is given back"


def test_without_a_terminal_there_are_lines(tmp_path: Path) -> None:
    make_run(tmp_path, events())
    command = [*JOURNEYWORK, "watch", "--every", "0.1", "--run-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert errors == ""
    for line in told:
        assert "m@30 reward 1.000" in line
        assert "\x1b" not in line


def test_once_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, events())
    assert main(["--once", "--run-dir", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "ALARM Rise of KL of m: it is far" in line


def test_a_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run-dir", str(tmp_path / "nowhere")]) == 2
    assert "is no run" in capsys.readouterr().err
    make_run(tmp_path, [])
    assert main(["--every", "0", "--run-dir", str(tmp_path)]) == 2
