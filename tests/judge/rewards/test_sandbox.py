"""A sandboxed reward function reaches no network and writes nothing; no function outlives its call."""

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from judge.rewards import sandbox
from judge.rewards.compose import open_composer_on_log
from judge.rewards.sandbox import RewardFunction, RewardFunctionError
from pipeline.config import Config, ConfigError, JudgeConfig, RewardConfig
from tests.judge.rewards.kit import function
from tests.kits.waiting import until_true

pytestmark = pytest.mark.timeout(300)

FAULT = sandbox.sandbox_fault()
needs_bubblewrap = pytest.mark.skipif(bool(FAULT), reason=FAULT)
everywhere = pytest.mark.parametrize("isolate", [pytest.param("require", marks=needs_bubblewrap), "off"])


def named(name: str) -> list[psutil.Process]:
    """Processes that call themselves `name` and still run."""
    processes = psutil.process_iter(["name", "status"])
    return [p for p in processes if p.info["name"] == name and p.info["status"] != psutil.STATUS_ZOMBIE]


async def gone(name: str) -> None:
    """Until no process has this name: what is killed may take a moment to end. By itself each takes 100 seconds."""
    await until_true(lambda: not named(name))


@pytest.fixture
def name() -> Iterator[str]:
    """A process name of this test alone."""
    unique = f"jw{os.getpid()}"
    yield unique
    for left in named(unique):
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()


async def refused(call: RewardFunction, trajectory: dict[str, Any], why: str = "Error") -> None:
    with pytest.raises(RewardFunctionError, match=why):
        await call(trajectory)


# -- the world outside -------------------------------------------------------------------------------------------


@needs_bubblewrap
async def test_a_function_reaches_no_network_and_no_file(tmp_path: Path) -> None:
    secret, target = tmp_path / "secret", tmp_path / "target"
    secret.write_text("key")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        for name, task in [("connects", port), ("writes", str(target)), ("reads", str(secret))]:
            async with function(name).open() as call:
                await refused(call, {"id": "a", "task": task})
            async with function(name, "off").open() as call:  # and that is the sandbox's doing
                assert (await call({"id": "a", "task": task})).reward > 0
    target.unlink()
    async with function("writes").open() as call:
        await refused(call, {"id": "a", "task": str(target)})
    assert not target.exists()
    async with function("writes_somewhere").open() as call:
        assert (await call({"id": "a"})).reward == 0.0
    async with function("length").open() as call:  # what only computes notices nothing
        assert (await call({"id": "a", "messages": [1, 2, 3]})).reward == 0.3


@needs_bubblewrap
@pytest.mark.parametrize("abstract", [False, True])
async def test_a_function_reaches_no_unix_socket_of_the_machine(tmp_path: Path, abstract: bool) -> None:
    address = f"@journeywork-{os.getpid()}" if abstract else str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address.replace("@", "\0"))
        server.listen()
        async with function("connects_unix").open() as call:
            await refused(call, {"id": "a", "task": address}, "ConnectionRefusedError|FileNotFoundError")
        async with function("connects_unix", "off").open() as call:
            assert (await call({"id": "a", "task": address})).reward == 1.0


@needs_bubblewrap
async def test_a_function_reads_its_search_path_and_what_is_named_and_not_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, data, other = tmp_path / "work", tmp_path / "data", tmp_path / "other"
    run = work / "runs" / "x"
    for folder in (work / "mine", data, other, run):
        folder.mkdir(parents=True)
        (folder / "text").write_text("abc")
    (work / "mine" / "score.py").write_text(
        "import helper\ndef reads(t):\n    return float(len(open(t['task']).read())) * helper.ONE\n"
    )
    (work / "helper.py").write_text("ONE = 1.0\n")
    monkeypatch.chdir(work)
    config = RewardConfig(name="x", kind="python", entry="mine.score:reads", isolate="require", readable=("../data",))
    async with RewardFunction(config, ("runs/x",)).open() as call:
        for seen in (work / "mine", data):
            assert (await call({"id": "a", "task": str(seen / "text")})).reward == 3.0
        for unseen in (run, other):
            await refused(call, {"id": "a", "task": str(unseen / "text")}, "FileNotFoundError")


# -- other calls, and the judge ----------------------------------------------------------------------------------


@everywhere
async def test_a_process_that_a_function_forks_does_not_outlive_its_call(isolate: str, name: str) -> None:
    """In a sandbox even if it has left its session."""
    bad = {"id": "bad", "task": name, "daemon": isolate == "require"}
    async with function("forks", isolate).open() as call:
        assert (await call(bad)).reward == 0.5
        await gone(name)  # after an answer
        assert (await call({"id": "good"})).reward == 0.5
        async with anyio.create_task_group() as tg:
            tg.start_soon(call, {**bad, "hang": True})
            while not named(name):
                await anyio.sleep(0.05)
            tg.cancel_scope.cancel()
        await gone(name)  # after the judge gave up
        assert (await call({"id": "good"})).reward == 0.5
    async with function("forks", isolate, timeout_s=2.0).open() as call:
        await refused(call, {**bad, "hang": True}, "took longer than 2")
        await gone(name)  # after too long
        assert (await call({"id": "good"})).reward == 0.5


@needs_bubblewrap
async def test_a_call_that_kills_every_process_it_can_fails_only_its_own_score() -> None:
    async with function("kills").open() as call:
        await refused(call, {"id": "bad"}, "ended its process")
        assert (await call({"id": "good"})).reward == 0.5


@everywhere
async def test_nothing_of_a_call_is_left_for_the_next(isolate: str) -> None:
    async with function("remembers", isolate).open() as call:
        assert [(await call({"id": i})).reward for i in "abc"] == [1.0, 1.0, 1.0]


@everywhere
async def test_what_a_function_prints_goes_to_the_judge_s_log_at_the_level_debug(
    isolate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("judge.rewards.sandbox.logger.debug", lambda _, **fields: said.extend(fields.get("text", ())))
    async with function("length", isolate).open() as call:
        await call({"id": "a", "messages": []})
    assert "".join(said) == "this does not disturb the protocol\n"
    async with function("exits", isolate).open() as call:
        await refused(call, {"id": "a"}, "SystemExit in line [0-9]+ of functions.py")


@needs_bubblewrap
async def test_the_kernel_bounds_the_processes_of_a_sandbox() -> None:
    async with function("limit", processes=20).open() as call:
        assert (await call({"id": "a"})).reward == 20.0


# -- the machine -------------------------------------------------------------------------------------------------


async def test_without_bubblewrap_require_is_an_error_at_start_and_auto_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    warned: list[dict[str, object]] = []
    monkeypatch.setattr("judge.rewards.sandbox.logger.warning", lambda _, **fields: warned.append(fields))
    reward = RewardConfig(name="x", kind="python", entry="tests.judge.functions:length", isolate="require")
    with pytest.raises(ConfigError, match="bubblewrap is not installed: install bubblewrap"):
        async with open_composer_on_log(Config(judge=JudgeConfig(rewards=(reward,))), None):  # type: ignore[arg-type]
            pass
    async with function("length", "auto").open() as call:
        assert (await call({"id": "a", "messages": []})).reward == 0.0
    assert [w["reason"] for w in warned] == [sandbox.sandbox_fault()]


@everywhere
async def test_a_killed_judge_leaves_no_process_of_its_functions(isolate: str, name: str) -> None:
    if isolate == "require" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    code = (
        "import anyio, sys\nfrom tests.judge.rewards.kit import function\n"
        "async def main():\n    async with function('forks', sys.argv[1]).open() as call:\n"
        "        daemon = sys.argv[1] == 'require'\n"
        "        await call({'id': 'bad', 'task': sys.argv[2], 'daemon': daemon, 'hang': True})\nanyio.run(main)\n"
    )
    judge = subprocess.Popen([sys.executable, "-c", code, isolate, name])
    await until_true(lambda: named(name))
    judge.send_signal(signal.SIGKILL)
    judge.wait()
    await gone(name)


# -- a worker that fails ---------------------------------------------------------------------------------------------


async def test_a_process_that_the_machine_refuses_fails_the_call_and_the_next_one_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def full(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as machine:
        machine.setattr("judge.rewards.sandbox.anyio.open_process", full)
        async with function("length", "off").open() as call:
            await refused(call, {"id": "a", "messages": []}, "length cannot be started: .*temporarily")
            machine.undo()
            assert (await call({"id": "a", "messages": []})).reward == 0.0


async def test_a_worker_that_hangs_is_not_said_to_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_import.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.chdir(tmp_path)
    async with function("length", "off", timeout_s=0.1).open() as call:
        assert call._process is not None
        call._process.send_signal(signal.SIGSTOP)
        for name in ("_START_S", "_STOP_S"):
            monkeypatch.setattr(f"judge.rewards.sandbox.{name}", 0.1)
        await refused(call, {"id": "a", "messages": []}, "length took longer than 0.1 s")
    async with function("length", "off", entry="slow_import:length").open() as call:
        await refused(call, {"id": "a"}, "slow_import:length took longer than 0.1 s")


@pytest.mark.parametrize("script", ["sleep 60", None], ids=["hangs", "can't be started"])
def test_bubblewrap_that_does_not_answer_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None
) -> None:
    monkeypatch.setattr(sandbox, "_START_S", 0.2)
    bwrap = tmp_path / "bwrap"
    monkeypatch.setattr(sandbox, "_BWRAP", (str(bwrap),))
    bwrap.write_text(f"#!/bin/sh\nexec {script}\n")
    bwrap.chmod(0o755 if script else 0o644)
    assert "does not work here" in sandbox._try_sandbox(str(bwrap))
