"""Arguments that are refused with what is allowed, and the exit status after an error."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from journeywork.command_line import add_gateway, at_least_one, exit_status, gateway_of, not_negative
from pipeline.running.state import process_start


def test_numbers_are_read_within_their_bounds() -> None:
    assert (at_least_one("7"), not_negative("0"), not_negative("0.5")) == (7, 0.0, 0.5)
    for kind, text in (
        (at_least_one, "0"),
        (at_least_one, "-1"),
        (at_least_one, "1.5"),
        (at_least_one, "²"),
        (not_negative, "-1"),
        (not_negative, "nan"),
        (not_negative, "inf"),
        (not_negative, "x"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=f"not '{text}'"):
            kind(text)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("no such option"), 2, "journeywork: no such option\n"),
        (LookupError("no answer"), 1, "journeywork: no answer\n"),
        (KeyboardInterrupt(), 130, "journeywork: interrupted\n"),
    ],
)
def test_an_error_ends_a_command_with_one_line(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, exit_status((ValueError,), (LookupError,)):
        raise error
    assert (ended.value.code, capsys.readouterr().err) == (status, said)


def test_an_error_of_the_program_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), exit_status((ValueError,), ()):
        raise ZeroDivisionError


def test_the_gateway_of_the_run_that_runs_comes_before_newer_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JOURNEYWORK_URL", raising=False)
    for at, (name, pid) in enumerate({"running": os.getpid(), "ended": 2**22 + 1, "before": os.getpid()}.items(), 1):
        since = process_start(pid) if name == "running" else "an earlier boot 5"
        state = tmp_path / "runs" / name / "state.json"
        state.parent.mkdir(parents=True)
        state.write_text(json.dumps({"pid": pid, "since": since, "urls": {"gateway": f"http://{name}:1"}}))
        os.utime(state, (at, at))
    parser = argparse.ArgumentParser()
    add_gateway(parser)
    assert gateway_of(parser.parse_args([])) == "http://running:1"
    monkeypatch.setenv("JOURNEYWORK_URL", "")
    assert gateway_of(parser.parse_args([])) == "http://running:1"
    monkeypatch.setenv("JOURNEYWORK_URL", "http://set:1")
    assert gateway_of(parser.parse_args([])) == "http://set:1"
    assert gateway_of(parser.parse_args(["--run-dir", "runs/ended"])) == "http://ended:1"
    assert gateway_of(parser.parse_args(["--url", "http://given:1"])) == "http://given:1"
