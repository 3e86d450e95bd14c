"""The supervisor with real processes."""

import dataclasses
import io
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from pipeline.commands import main as cli
from pipeline.config import Config, SupervisorConfig, load
from pipeline.files import write_once
from pipeline.running import child, ports
from pipeline.running.plan import ONE_PROCESS, ProcessSpec, make_plan, one_process_environment, require_base_files
from pipeline.running.supervisor import Supervisor, SupervisorError
from tests.conftest import free_port
from tests.pipeline.running.supervised import Changes, runs, supervised

SERVICE = """
import argparse, os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
p = argparse.ArgumentParser(); p.add_argument("--ready-fd", type=int); a = p.parse_args()
os.write(a.ready_fd, b'{"ready": true}\\n'); os.close(a.ready_fd)
signal.sigwait({signal.SIGTERM})
print("stopped in order", flush=True)
"""


def service(name: str, code: str = SERVICE) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-c", code))


def config(tmp_path: Path) -> Config:
    return load(None, [f"run_dir={tmp_path}"])


def state(tmp_path: Path) -> dict[str, object]:
    return msgspec.json.decode((tmp_path / "state.json").read_bytes())  # type: ignore[no-any-return]


async def test_it_reports_ready_restarts_what_was_killed_and_stops_in_order(tmp_path: Path) -> None:
    specs = (service("gateway"), service("judge"))
    async with supervised(config(tmp_path), *specs) as (supervisor, changes):
        assert state(tmp_path)["ready"] is True
        judge = supervisor.watched["judge"]
        os.kill(judge.pid, signal.SIGKILL)
        await changes.until(lambda: judge.restarts == 1 and judge.state == "ready")
    assert "stopped in order" in (tmp_path / "logs" / "gateway.log").read_text()
    assert {s["state"] for s in state(tmp_path)["services"].values()} == {"stopped"}  # type: ignore[attr-defined]


async def test_state_is_written_where_it_changed(tmp_path: Path) -> None:
    """The file's time tells commands which of several installations changed last."""
    every = config(tmp_path).replace(supervisor=SupervisorConfig(probe_every_s=0.05))
    async with supervised(every, service("judge")) as (supervisor, _):
        before = (tmp_path / "state.json").stat().st_ino
        for _ in range(3):
            supervisor._write_state()
        assert (tmp_path / "state.json").stat().st_ino == before


async def test_a_process_that_is_being_launched_when_it_is_to_stop_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launching, go_on, launch = anyio.Event(), anyio.Event(), child.launch

    async def slowly(*args: Any, **options: Any) -> Any:
        launching.set()
        await go_on.wait()
        return await launch(*args, **options)

    monkeypatch.setattr(child, "launch", slowly)
    changes = Changes()
    supervisor = Supervisor(config(tmp_path), [service("judge")], on_change=changes)
    (tmp_path / "logs").mkdir()
    watched = supervisor.watched["judge"]
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tg:
            tg.start_soon(supervisor._keep_running, watched)
            await launching.wait()
            await supervisor._stop(watched)
            go_on.set()
    assert [state for state, _ in changes.seen] == ["stopping", "stopped"]
    assert watched.pid
    assert not runs(watched.pid)


async def test_a_start_that_hangs_is_ended_and_tried_again(tmp_path: Path) -> None:
    hang = f"""
import pathlib, time
flag = pathlib.Path({str(tmp_path / "hung")!r})
if not flag.exists():
    flag.touch()
    time.sleep(60)
"""
    spec = dataclasses.replace(service("trainer", hang + SERVICE), start_timeout_s=5.0)
    async with supervised(config(tmp_path), spec) as (supervisor, _):
        assert supervisor.watched["trainer"].restarts >= 1  # a start of a busy machine may take as long again
    said = (tmp_path / "logs" / "trainer.log").read_text()
    assert "Fatal Python error: Aborted" in said  # and where it hung


@pytest.mark.parametrize(
    ("failing", "told"),
    [
        ("log.error('no such model', model='x'); sys.exit(1)", "no such model model=x"),
        # Such as vLLM's traceback. `up` said "backoff" for five minutes, and nothing else.
        ("raise RuntimeError('could not locate the bot token')", "RuntimeError: could not locate the bot token"),
    ],
)
async def test_errors_of_a_start_are_told_with_its_state(failing: str, told: str, tmp_path: Path) -> None:
    """Those of the present start only, whether it works or not."""
    code = f"""
import pathlib, sys
from pipeline.telemetry import logs
logs.configure("judge")
log, flag = logs.get_logger("judge"), pathlib.Path({str(tmp_path / "failed")!r})
if not flag.exists():
    flag.touch()
    {failing}
log.error("no library", name="wandb")
"""
    async with supervised(config(tmp_path), service("judge", code + SERVICE)) as (_, changes):
        pass
    assert ("backoff", (told,)) in changes.seen
    assert ("ready", ("no library name=wandb",)) in changes.seen


async def test_a_child_dies_with_a_killed_supervisor(tmp_path: Path) -> None:
    code = f"""
import anyio, sys
from pipeline.config import load
from pipeline.running.plan import ProcessSpec
from pipeline.running.supervisor import Supervisor
async def main():
    s = Supervisor(load(None, ["run_dir={tmp_path}"]), [ProcessSpec("judge", (sys.executable, "-c", {SERVICE!r}))])
    async with anyio.create_task_group() as tg:
        await tg.start(s.run)
        print(s.watched["judge"].pid, flush=True)
anyio.run(main)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 60
    while runs(child):
        assert time.monotonic() < deadline
        await anyio.sleep(0.02)


def test_a_free_port_is_returned_once_and_is_none_that_the_system_gives_to_others() -> None:
    """A child does not listen yet when the next one's port is chosen."""
    wanted = free_port()
    assert ports.free_port(ports.LOOPBACK, wanted) == wanted
    assert ports.free_port(ports.LOOPBACK, wanted) not in (0, wanted)
    assert all(ports.free_port() < 32_768 for _ in range(3))
    with pytest.raises(OSError, match="assign"):
        ports.free_port("192.0.2.1")


@pytest.mark.parametrize(
    ("services", "settings", "taken"),
    [
        ("store", ["nats.port={0}"], "nats"),
        ("sampler", ["vllm.port={0}", "models.0.base=somewhere"], "vllm"),
        ("judge,gateway", ["gateway.port={0}"], "gateway"),
        ("store,ui", ["ui.port={0}"], "ui"),
        ("gateway", ["nats.port={1}", "gateway.port={1}"], "gateway"),
    ],
)
def test_a_port_of_the_settings_that_is_taken_is_an_error_before_anything_starts(
    services: str,
    settings: list[str],
    taken: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "require_base_files", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        numbers = other.getsockname()[1], free_port()
        given = [part for setting in settings for part in ("--set", setting.format(*numbers))]
        with pytest.raises(SystemExit, match=r"^2$"):
            cli.main(["up", "--run-dir", str(tmp_path), "--services", services, *given])
    port = numbers["{1}" in settings[-1]]
    said = f"{taken}.port: {taken} can't listen on port {port} of 127.0.0.1: Address already in use"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "state.json").exists()


def test_the_plan_fills_in_every_address(tmp_path: Path) -> None:
    base = load(None, [f"run_dir={tmp_path}", "models.0.base=somewhere", "models.0.name=m"])
    resolved, specs = make_plan(base, ("gateway", "sampler", "store"))
    assert [s.name for s in specs] == ["nats", "vllm", "gateway", "sampler", "store"]
    assert resolved.nats.url.startswith("nats://127.0.0.1:")
    assert "m@0" in specs[1].argv
    external, specs = make_plan(
        load(None, [f"run_dir={tmp_path}", 'nats.url="nats://elsewhere:4222"', 'vllm.urls=["http://gpu:8000"]']),
        ("gateway",),
    )
    assert [s.name for s in specs] == ["gateway"]
    assert external.nats.url == "nats://elsewhere:4222"


def test_the_trainers_gpu_memory_grows_in_segments_unless_the_environment_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of all lengths break fixed ones into pieces."""
    base = load(None, [f"run_dir={tmp_path}", "models.0.base=hub/base"])
    for given, used in (("", "expandable_segments:True"), ("max_split_size_mb:64", "max_split_size_mb:64")):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", given) if given else monkeypatch.delenv("PYTORCH_ALLOC_CONF", False)
        gateway, trainer = make_plan(base, ("gateway", "trainer"))[1][-2:]
        assert (gateway.env.get("PYTORCH_ALLOC_CONF"), trainer.env["PYTORCH_ALLOC_CONF"]) == (None, used)


@pytest.mark.parametrize(
    ("settings", "ahead"),
    [
        ((), 8 * 3),
        (("trainer.groups_per_step=4", "trainer.max_staleness=1"), 4 * 2),
        (("gateway.max_groups_ahead=5",), 5),
        (("gateway.max_groups_ahead=0",), 0),
        (("trainer.max_steps=10",), 0),  # what is not trained by then stays untrained
    ],
)
def test_groups_ahead_are_those_that_the_trainer_trains_before_they_are_stale(
    tmp_path: Path, settings: tuple[str, ...], ahead: int
) -> None:
    base = load(None, [f"run_dir={tmp_path}", "models.0.base=hub/base", "models.0.name=m", *settings])
    assert make_plan(base, ("gateway", "trainer"))[0].gateway.max_groups_ahead == ahead
    if not settings:
        assert make_plan(base, ("gateway",))[0].gateway.max_groups_ahead == "auto"


def test_a_base_model_that_is_not_on_this_machine_is_an_error_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`up` exits with one line, while the server that loads the model would fail after a minute."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "empty").mkdir()
    folder = str(tmp_path / "empty")
    for base, said in (
        ("organisation/model", "'organisation/model' is not on this machine"),
        (folder, f"the folder {folder!r} holds no model"),
        ("/no/such", "there is no folder '/no/such'"),
    ):
        with pytest.raises(SystemExit, match=r"^2$"):
            cli.main(["up", "--run-dir", str(tmp_path / "run"), "--set", f"models.0.base={base}"])
        assert f"models.0.base: {said}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["up", "--dry-run"])
    assert "models.0.base is not set: give the folder of the base model" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    there = tmp_path / "hub" / "models--organisation--model" / "snapshots" / "0" / "config.json"
    there.parent.mkdir(parents=True)
    there.write_text("{}")
    require_base_files(load(None, ["models.0.base=organisation/model"]), ("trainer",))


@pytest.mark.parametrize(
    ("mine", "settings", "vllm", "trainer"),
    [
        ("", [], "0.45", 0.45),
        ("2,3", [], "0.45", 0.45),
        ("", ["trainer.memory.gpu_share=0.6"], "0.3", 0.6),
        ("", ['vllm.args=["--gpu-memory-utilization", "0.5"]'], "0.5", 0.4),
        ("", ['vllm.args=["--gpu-memory-utilization=0.7"]'], "", 0.2),
        ("", ['vllm.args=["--gpu_memory_utilization", "0.7"]'], "", 0.2),
        ("", ['vllm.env.CUDA_VISIBLE_DEVICES="1"'], "", 0.0),
        ("", ['vllm.env.CUDA_VISIBLE_DEVICES="1"', "trainer.processes=2"], "0.45", 0.45),
        ("0", ['vllm.env.CUDA_VISIBLE_DEVICES="0,1"'], "0.45", 0.45),
        ("", ["vllm.sleep=true"], "0.85", 0.85),
        ("", ["vllm.sleep=true", "trainer.memory.gpu_share=0.6"], "0.85", 0.6),
        ("", ["vllm.sleep=true", 'vllm.args=["--gpu-memory-utilization", "0.5"]'], "0.5", 0.85),
        ("", ["vllm.device=cpu"], "", 0.0),
        ("", ['vllm.urls=["http://gpu:8000"]'], "", 0.0),
    ],
)
def test_the_gpu_is_divided_where_vllm_and_the_trainer_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: str, settings: list[str], vllm: str, trainer: float
) -> None:
    """No GPU here: what counts is what vLLM is started with and what the trainer is told."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mine)
    base = [f"run_dir={tmp_path}", "models.0.base=somewhere", "vllm.device=cuda"]
    resolved, specs = make_plan(load(None, [*base, *settings]), ("sampler", "trainer"))
    argv = [a for s in specs if s.name == "vllm" for a in s.argv]
    flag = "--gpu-memory-utilization"
    assert argv.count(flag) == bool(vllm)
    assert (argv[argv.index(flag) + 1] if vllm else "") == vllm
    assert resolved.trainer.memory.gpu_share == trainer
    # A trainer that shares a GPU by turns loads its model once vLLM can sleep.
    by_turns = "vllm.sleep=true" in settings
    assert ("--enable-sleep-mode" in argv) == by_turns
    assert ("vllm" in next(s.needs for s in specs if s.name == "trainer")) == by_turns
    # Without a trainer vLLM has the GPU to itself.
    _, alone = make_plan(load(None, base), ("sampler",))
    assert not [s for s in alone if flag in s.argv]


@pytest.mark.parametrize(
    ("settings", "flag", "values"),
    [
        # vLLM's CPU kernels use the last slot's weights for requests without an adapter.
        (["vllm.max_loras=5", "vllm.device=cpu"], "--max-loras", ["6"]),
        (["vllm.max_loras=5"], "--max-loras", ["5"]),
        # It holds the base model as the trainer does.
        ([], "--quantization", []),
        (["trainer.memory.quantization=fp8"], "--quantization", ["fp8"]),
        (["models.0.trainer.memory.quantization=4bit"], "--quantization", ["bitsandbytes"]),
        (["trainer.memory.quantization=4bit", 'vllm.args=["--quantization=fp8"]'], "--quantization", []),
        (["trainer.memory.quantization=4bit", 'vllm.args=["-q", "fp8"]'], "--quantization", []),
        (["trainer.memory.quantization=4bit", "vllm.device=cpu"], "--quantization", []),
        # On a CPU it is one process. It takes the last of several values of a flag.
        (["vllm.device=cpu"], ONE_PROCESS[0], [ONE_PROCESS[1]]),
        (["vllm.device=cpu", f'vllm.args=["{ONE_PROCESS[0]}", "mp"]'], ONE_PROCESS[0], [ONE_PROCESS[1], "mp"]),
        (["vllm.device=cpu", 'vllm.args=["--tensor_parallel_size=2"]'], ONE_PROCESS[0], []),
        (["vllm.device=cpu", 'vllm.args=["-tp", "2"]'], ONE_PROCESS[0], []),
        ([], ONE_PROCESS[0], []),
    ],
)
def test_what_vllm_is_started_with(tmp_path: Path, settings: list[str], flag: str, values: list[str]) -> None:
    base = [f"run_dir={tmp_path}", "models.0.base=somewhere", "vllm.device=cuda"]
    argv = make_plan(load(None, [*base, *settings]), ("sampler",))[1][1].argv
    assert [argv[i + 1] for i, arg in enumerate(argv) if arg == flag] == values


@pytest.mark.parametrize(
    ("settings", "threads"),
    [
        (["vllm.device=cpu"], "3"),
        (["vllm.device=cpu", "vllm.env.OMP_NUM_THREADS=2"], "2"),
        (["vllm.device=cpu", 'vllm.args=["-tp", "2"]'], None),
        (["vllm.device=cuda"], None),
    ],
)
def test_vllm_on_a_cpu_leaves_a_core_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], threads: str | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    base = [f"run_dir={tmp_path}", "models.0.base=somewhere"]
    _, specs = make_plan(load(None, [*base, *settings]), ("sampler",))
    assert specs[1].env.get("OMP_NUM_THREADS") == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert one_process_environment()["OMP_NUM_THREADS"] == "1"


def test_an_empty_secret_ends_the_start_with_what_is_wrong(tmp_path: Path) -> None:
    key = tmp_path / "vllm.key"
    key.touch()
    spec = dataclasses.replace(service("gateway"), prepare=lambda: write_once(key, lambda: b"secret"))
    supervisor = Supervisor(config(tmp_path), (spec,))
    with pytest.raises(SupervisorError, match=r"vllm\.key is empty: delete it"):
        cli._run_supervisor(config(tmp_path), (), supervisor, io.StringIO())
