"""What an example's script needs around its agent: a running installation, and a few flags."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import anyio
import openai
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from journeywork import AsyncJourneywork, Trajectory
from journeywork.transport import plain_errors
from pipeline.running.state import read_state

ROOT = Path(__file__).resolve().parents[2]
JOURNEYWORK = str(Path(sys.executable).with_name("journeywork"))
LOOK_EVERY_S = 0.2
"""Seconds between two looks at the installation's state while it starts."""

_POOL = openai.AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=8, timeout=120)
"""One pool of connections for all agents."""


class ExampleError(Exception):
    """The run failed. The message says where to look."""


class Installation:
    """`journeywork up` in a process of its own. Use it in a `with` block, at whose end it is stopped."""

    def __init__(self, run_dir: Path, config: Path, overrides: Mapping[str, Any], *flags: str) -> None:
        """Start the process. `config`: file of settings; `overrides`: settings by their dotted names; `flags`: further
        flags of the command."""
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        settings = [part for key, value in overrides.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        with (run_dir / "up.log").open("wb") as log:
            self.process = subprocess.Popen(
                [JOURNEYWORK, "up", "--config", str(config), "--run-dir", str(run_dir), *settings, *flags],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the installation after the store has written everything that the log holds. Raises `ExampleError` if it
        does not stop."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise ExampleError(f"journeywork up did not stop; see {self.run_dir}/logs") from None

    def check(self) -> None:
        """Raise `ExampleError` if the process has ended."""
        if self.process.poll() is not None:
            tail = (self.run_dir / "up.log").read_text("utf-8", "replace")[-3000:]
            raise ExampleError(f"journeywork up ended with code {self.process.returncode}:\n{tail}")

    async def ready(self) -> str:
        """Wait until all services are ready, and return the gateway's URL. Raises `ExampleError` if the process
        ends."""
        path = self.run_dir / "state.json"
        while True:
            self.check()
            if path.exists() and (state := json.loads(path.read_text()))["ready"]:
                return str(state["urls"]["gateway"])
            await anyio.sleep(LOOK_EVERY_S)

    def usage(self) -> dict[str, dict[str, float]]:
        """Return what each service and its child processes have used so far: the sum of their peak resident memories in
        MB, and processor time in seconds."""
        state = read_state(self.run_dir)
        assert state is not None
        usage = {}
        for name, service in state.services.items():
            family = [psutil.Process(service.pid), *psutil.Process(service.pid).children(recursive=True)]
            times = [process.cpu_times() for process in family]
            usage[name] = {
                "memory_mb": round(sum(_peak_memory_mb(process.pid) for process in family), 1),
                "processor_s": round(sum(t.user + t.system for t in times), 1),
            }
        return usage


def run_command(
    run_dir: Path, config: Path, settings: Mapping[str, Any], up_flags: Sequence[str], *command: str
) -> str:
    """Run a command of `journeywork` while the log and the store of a stopped installation run. Return what the command
    printed. Raises `ExampleError` if it fails."""
    with Installation(run_dir, config, settings, "--services", "store", *up_flags) as up:
        anyio.run(up.ready)
        name, *options = command
        argv = [JOURNEYWORK, name, "--run-dir", str(run_dir), *options]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExampleError(f"journeywork {name} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def supervised_step(
    run_dir: Path, config: Path, settings: Mapping[str, Any], up_flags: Sequence[str], rows: list[Any], *tuning: str
) -> None:
    """Train the base model on conversations by `journeywork train`, as step 1 of the history. `rows`: each with its
    `messages`; `tuning`: further flags of the command. The other parameters as in `run_command`."""
    folder = run_dir / "examples"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    run_command(run_dir, config, settings, up_flags, "train", "--on", str(folder), "--as", "sft", *tuning)


def _peak_memory_mb(pid: int) -> float:
    """Return the peak resident memory of a process, in MB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) / 1000


def disk_mb(folder: Path) -> float:
    """Return the disk space that the files of a folder take, in MB."""
    return round(sum(file.lstat().st_blocks for file in folder.rglob("*")) * 512 / 1e6, 1)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that are handed on to `journeywork up`."""
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="any setting")
    parser.add_argument("--vllm-url", help="an inference server that serves the base model already")


def flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of `add_flags` as the arguments that `journeywork up` takes."""
    settings = [part for setting in args.set for part in ("--set", setting)]
    return settings + (["--vllm-url", args.vllm_url] if args.vllm_url else [])


def fast_bfloat16() -> bool:
    """Return whether this machine's processors multiply bfloat16 in hardware. Elsewhere it is several times slower than
    float32."""
    try:
        processors = Path("/proc/cpuinfo").read_text("ascii", "replace")
    except OSError:
        return False
    return any(f" {name} " in processors or f" {name}\n" in processors for name in ("avx512_bf16", "amx_bf16", "bf16"))


def agent(run: Trajectory) -> openai.AsyncOpenAI:
    """Return the client with which an agent plays a run."""
    return _POOL.with_options(base_url=run.base_url, api_key=run.api_key)


async def served_step(client: AsyncJourneywork, model: str) -> int:
    """Return the policy step that answers the model's calls now; 0 is the base model."""
    (step,) = (entry["step"] for entry in await client.policies() if entry["model"] == model)
    return int(step)


@contextlib.contextmanager
def as_program(run_dir: Path) -> Iterator[None]:
    """Run an example within the block as a program: Ctrl-C and SIGTERM end it with 130 once the installation has
    stopped, and an `ExampleError` is printed and ends it with 1."""
    # SIGTERM ends the program as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with plain_errors(Exception):
            yield
    except KeyboardInterrupt:
        print(f"stopped; what was played so far is in {run_dir}")
        raise SystemExit(130) from None
    except ExampleError as error:
        print(error)
        raise SystemExit(1) from error


def make_room(run_dir: Path) -> None:
    """Rename the folder of an earlier run, if it is there, to its name with the time of its last change. Raises
    `ExampleError` if its installation still runs, because that would go on in the new folder."""
    if run_dir.exists():
        with (run_dir / "up.lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ExampleError(
                    f"an installation runs in {run_dir}: stop its `journeywork up`, or choose another --run-dir"
                ) from None
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(run_dir.stat().st_mtime))
        run_dir.rename(run_dir.with_name(f"{run_dir.name}-{stamp}"))
