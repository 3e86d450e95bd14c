"""A program that is forked from a warm process is told and does what an executed one is and does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

from tests.kits import warm
from tests.kits.warm import COLD, ROOT

PROGRAM = [sys.executable, "-m", "tests.kits.warm_program"]


def environment(cold: bool, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **({COLD: "1"} if cold else {}), **more}


def is_warm(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def facts_of(cold: bool, cwd: Path, **options: Any) -> dict[str, Any]:
    """What the program says, but its process id."""
    reading, writing = os.pipe()
    with subprocess.Popen(
        [*PROGRAM, "0", str(writing)], pass_fds=[writing], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=cwd, env=environment(cold, VARIABLE="né\udcff"), **options,
    ) as process:  # fmt: skip
        os.close(writing)
        assert process.communicate("given") == ("at exit\n", "to stderr\n")
        assert process.returncode == 0
    with os.fdopen(reading) as pipe:
        facts: dict[str, Any] = json.load(pipe)
    assert facts.pop("pid") == process.pid
    handle = int(facts["argv"].pop())
    facts["open"].remove(handle)
    facts["environment"] = [entry for entry in facts["environment"] if not entry.startswith(COLD)]
    return facts


@pytest.mark.parametrize("options", [{}, {"start_new_session": True}])
def test_a_forked_program_is_given_what_an_executed_one_is(tmp_path: Path, options: dict[str, Any]) -> None:
    forked, executed = (facts_of(cold, tmp_path, **options) for cold in (False, True))
    assert forked.pop("modules") > executed.pop("modules") + 100
    assert forked == executed
    assert forked["parent"] == os.getpid()


@pytest.mark.parametrize(("how", "status"), [("0", 0), ("7", 7), ("say no", 1), ("fail", 1)])
def test_a_forked_program_ends_as_an_executed_one(how: str, status: int) -> None:
    forked, executed = (
        subprocess.run([*PROGRAM, how], env=environment(cold), cwd=ROOT, capture_output=True, check=False, text=True)
        for cold in (False, True)
    )  # fmt: skip
    assert (forked.returncode, forked.stdout) == (executed.returncode, executed.stdout)
    assert forked.returncode == status
    said = [line for line in executed.stderr.splitlines() if "frozen" not in line and "^" not in line]
    assert [line for line in forked.stderr.splitlines() if "^" not in line] == said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGABRT])
def test_a_signal_ends_a_forked_program_as_an_executed_one(number: signal.Signals) -> None:
    for cold in (False, True):
        with subprocess.Popen(
            [*PROGRAM, "wait"], env=environment(cold, PYTHONFAULTHANDLER="1"), cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        ) as process:  # fmt: skip
            said: IO[bytes] | None = process.stdout
            assert said is not None
            assert said.readline() == b"waits\n"
            assert is_warm(process.pid) is not cold
            os.killpg(process.pid, number)
            _, errors = process.communicate(timeout=60)
        assert process.returncode == -number
        assert (b"Fatal Python error: Aborted" in errors) == (number == signal.SIGABRT)
        assert (b"KeyboardInterrupt" in errors) == (number == signal.SIGINT)


def test_a_warm_process_that_ended_is_replaced(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    server = warm._Server("torch")
    monkeypatch.setitem(warm._servers, ("torch",), server)
    server._process = subprocess.Popen(["false"])
    server._process.wait()
    server._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    try:
        subprocess.run([*PROGRAM, "0"], env=environment(False), cwd=ROOT, check=True)
    finally:
        server.close()
    assert "the process that has imported torch ended with 1" in capfd.readouterr().err
