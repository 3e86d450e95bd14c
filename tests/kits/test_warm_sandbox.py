"""A program that a sandbox starts is forked inside of it, and is given what an executed one is."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from judge.rewards.sandbox_view import unavailable
from tests.compose_box import installed, machine
from tests.kits.disk import small_disk
from tests.kits.warm import COLD, ROOT
from tests.kits.warm_sandbox import PLACE, WarmPrograms

pytestmark = [
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root enters the namespaces of another process"),
]


def run(folder: Path, *arguments: str) -> tuple[int, bytes, dict[str, Any]]:
    """Run `tests.kits.warm_program` in a sandbox; return its status, its output and its facts."""
    programs = WarmPrograms(folder)
    argv = [
        "bwrap",
        "--unshare-user",
        "--uid",
        "10001",
        "--unshare-pid",
        "--unshare-ipc",
        "--cap-drop",
        "ALL",
    ]
    argv += [
        *machine("--bind"),
        *installed(),
        "--bind",
        *2 * [str(folder.parent)],
        *programs.mount,
        "--clearenv",
        "--setenv",
        "PATH",
        f"{PLACE}:/bin",
    ]
    argv += ["--setenv", "PYTHONPATH", str(ROOT), "--chdir", str(folder.parent)]
    reading, writing = os.pipe()
    try:
        done = subprocess.run(
            [*argv, "--", "python", "-m", "tests.kits.warm_program", *arguments, str(writing)],
            pass_fds=[writing], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False,
        )  # fmt: skip
    finally:
        programs.close()
        os.close(writing)
    with os.fdopen(reading) as pipe:
        facts: dict[str, Any] = json.load(pipe)
    facts["argv"].pop()
    return done.returncode, done.stdout, facts


def test_a_program_in_a_sandbox_is_forked_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {}
    monkeypatch.setenv("LITELLM_LATER", "1")  # as an import of a library sets it in this process
    for kind in ("forked", "executed"):
        status, said, facts = run(tmp_path / kind, "7")
        assert (status, said) == (7, b"at exit\n")
        assert facts["cwd"] == str(tmp_path)
        assert facts["pid"] < 100  # the sandbox's own numbers
        told[kind] = facts
        monkeypatch.setenv(COLD, "1")
    # What others have imported before is imported. (Its parent is outside of the sandbox only until that one ends.)
    assert told["forked"]["modules"] > told["executed"]["modules"] + 100
    for name in ("argv", "environment", "file", "name", "variable", "stdin", "cores", "handlers", "threads"):
        assert told["forked"][name] == told["executed"][name], name


def test_no_capability_can_be_had_again(tmp_path: Path) -> None:
    _, _, facts = run(tmp_path / "programs", "0")
    assert facts["capabilities"] == {"CapInh": 0, "CapPrm": 0, "CapEff": 0, "CapBnd": 0, "CapAmb": 0}
    assert facts["identity"] == [10001, 1]  # and a program that is executed gains none


def test_a_sandbox_shows_no_mount_that_another_test_may_end(tmp_path: Path) -> None:
    """bubblewrap fails if a mount that it shows ends at that moment: 1 start in 70, beside tests that make networks."""
    argv = ["bwrap", *machine("--ro-bind"), *installed(), "--", "cat", "/proc/self/mountinfo"]
    with small_disk(tmp_path / "disk", 1):
        told = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    shown = {line.split()[4] for line in told.splitlines()}
    assert "/proc" in shown
    ended = ("/run/", str(tmp_path)) if tmp_path.is_relative_to("/tmp") else "/run/"
    assert not [place for place in shown if place.startswith(ended)]
