"""`journeywork logs`: lines of several services in the order of time, also while they are written."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from pipeline.running.log_files import Entry, Logs, main, parse


def line(at: float, event: str, level: str = "info", **fields: object) -> str:
    return (
        json.dumps({"at": at, "level": level, "service": "s", "logger": "l", "event": event, **fields}) + "\n"
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "gateway.log").write_text(line(1.0, "one", port=8) + line(3.0, "three", "error"))
    (logs / "trainer.log").write_text(
        line(2.0, "two") + "Traceback:\n  boom\n" + line(4.0, "four", "warning")
    )
    return tmp_path


def test_lines_are_merged_by_time(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run-dir", str(run)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [" ".join(s.split()[1:]) for s in said] == [
        "gateway one port=8", "trainer two", "trainer Traceback:", "trainer boom", "gateway three", "trainer four"
    ]  # fmt: skip
    assert said[0].startswith("00:00:01.000 gateway")


def test_services_levels_and_the_last_lines_are_chosen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def events(*arguments: str) -> list[str]:
        assert main([*arguments, "--json", "--run-dir", str(run)]) == 0
        return [json.loads(s)["event"] for s in capsys.readouterr().out.splitlines()]

    assert events("gateway") == ["one", "three"]
    assert events("--level", "warning") == ["three", "four"]
    assert events("-n", "2") == ["three", "four"]
    assert events("-n", "1", "--level", "error") == ["three"]
    assert events("-n", "100") == ["one", "two", "Traceback:", "  boom", "three", "four"]
    assert main(["gatway", "--run-dir", str(run)]) == 2
    assert "no log of gatway; there are: gateway, trainer" in capsys.readouterr().err


def test_what_was_logged_acts_on_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "judge.log").write_text(line(1.0, "said\x1b[2J", detail="\x1b]0;t\x07"))
    assert main(["--run-dir", str(tmp_path)]) == 0
    assert "said\\x1b[2J detail=\\x1b]0;t\\x07" in capsys.readouterr().out


def test_invalid_arguments_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run-dir", str(tmp_path / "nope")]) == 2
    assert f"{tmp_path / 'nope'} is no run with logs" in capsys.readouterr().err
    for lines in ("-5", "many"):
        with pytest.raises(SystemExit) as ended:
            main([f"--lines={lines}"])
        assert ended.value.code == 2
        assert f"'{lines}' is not a whole number of at least 0" in capsys.readouterr().err


def test_a_new_and_a_truncated_file_and_a_half_written_line_are_followed(run: Path) -> None:
    logs = Logs(run / "logs")

    def news() -> list[str]:
        return [e.text for e in logs.entries()]

    assert len(news()) == 6
    path = run / "logs" / "gateway.log"
    with path.open("a") as file:
        file.write(line(5.0, "five") + "half")
        file.flush()
        assert news() == ["five"]
        file.write(" a line\n")
    assert news() == ["half a line"]
    path.write_text("")
    assert news() == []
    (run / "logs" / "judge.log").write_text(line(7.5, "judging"))
    path.write_text(line(7.0, "seven"))
    assert news() == ["seven", "judging"]


def test_what_others_write_has_its_time() -> None:
    nats = parse("[12] 2026/11/22 05:59:01.500000 [WRN] slow", "nats", None)
    assert (nats.level, nats.text) == ("warning", "slow")
    assert nats.at == datetime(2026, 11, 22, 5, 59, 1, 500000).timestamp()
    stamp = datetime.now().strftime("%m-%d %H:%M:%S")
    vllm = parse(f"(APIServer pid=7) ERROR {stamp} [core.py:3] lost", "vllm", None)
    assert (vllm.level, vllm.text) == ("error", "[core.py:3] lost")
    assert abs(vllm.at - datetime.now().timestamp()) < 5
    future = parse("INFO 12-31 23:59:59 x", "vllm", Entry(1.0, "vllm", "info", ""))
    assert future.at <= datetime.now().timestamp() + 86_400
    assert parse("plain", "vllm", None) == Entry(0.0, "vllm", "info", "plain")
    assert parse('{"no": "time"}', "s", vllm).at == vllm.at


def test_the_command_follows_until_it_is_stopped(run: Path) -> None:
    command = [sys.executable, "-m", "pipeline", "logs", "-f", "-n", "1", "--run-dir", str(run)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A shell's background job ignores Ctrl-C, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert "four" in process.stdout.readline()
        with (run / "logs" / "gateway.log").open("a") as file:
            file.write(line(9.0, "later"))
        assert re.search(r"gateway +later", process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
