"""Arguments that are refused with what is allowed, and the exit status after an error."""

import argparse
import json
import os
from pathlib import Path

import pytest

from journeywork.command_line import at_least_one, exit_status, gateway_of


def test_numbers_are_read_within_their_bounds() -> None:
    assert at_least_one("7") == 7
    for text in ("0", "-1", "1.5", "²"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"not '{text}'"):
            at_least_one(text)


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


def test_the_gateway_of_the_newest_run_that_was_not_stopped_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JOURNEYWORK_URL", raising=False)
    with pytest.raises(ValueError, match="no gateway is named"):
        gateway_of()
    for at, (name, state) in enumerate({"before": "ready", "running": "ready", "ended": "stopped"}.items(), 1):
        file = tmp_path / "runs" / name / "state.json"
        file.parent.mkdir(parents=True)
        services = {"gateway": {"state": state}}
        file.write_text(json.dumps({"services": services, "urls": {"gateway": f"http://{name}:1"}}))
        os.utime(file, (at, at))
    assert gateway_of() == "http://running:1"
    (tmp_path / "runs" / "damaged").mkdir()
    (tmp_path / "runs" / "damaged" / "state.json").write_text("{")
    assert gateway_of() == "http://running:1"
    monkeypatch.setenv("JOURNEYWORK_URL", "http://set:1")
    assert gateway_of() == "http://set:1"
    assert gateway_of(run_dir="runs/before") == "http://before:1"
    assert gateway_of(url="http://given:1") == "http://given:1"
    with pytest.raises(ValueError, match="runs/ended is stopped"):
        gateway_of(run_dir="runs/ended")
    with pytest.raises(ValueError, match=r"none/state\.json names no gateway"):
        gateway_of(run_dir="none")
