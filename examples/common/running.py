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
from typing import Any

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
    """`journeywork up` in a process of its own, with its run directory `run_dir`."""

    def __init__(self, run_dir: Path, config: Path, overrides: Mapping[str, Any], *flags: str) -> None:
        """`overrides` are settings by their dotted names, `flags` more of the command's flags."""
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        given = [part for key, value in overrides.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        with (run_dir / "up.log").open("wb") as sink:
            self.process = subprocess.Popen(
                [JOURNEYWORK, "up", "--config", str(config), "--run-dir", str(run_dir), *given, *flags],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )

    def check(self) -> None:
        """Raises `ExampleError` if it has ended."""
        if self.process.poll() is not None:
            tail = (self.run_dir / "up.log").read_text("utf-8", "replace")[-3000:]
            raise ExampleError(f"journeywork up ended with code {self.process.returncode}:\n{tail}")

    async def ready(self) -> str:
        """Return the gateway's URL, once everything works."""
        path = self.run_dir / "state.json"
        while True:
            self.check()
            if path.exists() and (state := json.loads(path.read_text()))["ready"]:
                return str(state["urls"]["gateway"])
            await anyio.sleep(LOOK_EVERY_S)

    def usage(self) -> dict[str, dict[str, float]]:
        """Return what each service has taken so far, with its child processes: the sum of their largest resident
        memories in MB, and processor time in seconds."""
        state = read_state(self.run_dir)
        assert state is not None
        found = {}
        for name, service in state.services.items():
            family = [psutil.Process(service.pid), *psutil.Process(service.pid).children(recursive=True)]
            times = [process.cpu_times() for process in family]
            found[name] = {
                "memory_mb": round(sum(_largest_memory_mb(process.pid) for process in family), 1),
                "processor_s": round(sum(t.user + t.system for t in times), 1),
            }
        return found

    def stop(self) -> None:
        """Stop the installation after the store has written everything that the log holds."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise ExampleError(f"journeywork up did not stop; see {self.run_dir}/logs") from None


def on_the_log(run_dir: Path, config: Path, settings: Mapping[str, Any], up_flags: Sequence[str], *command: str) -> str:
    """Run a command of `journeywork` on a stopped installation, whose log and store it starts. Return what the command
    printed. Raises `ExampleError` if it fails."""
    log = Installation(run_dir, config, settings, "--services", "store", *up_flags)
    try:
        anyio.run(log.ready)
        name, *options = command
        argv = [JOURNEYWORK, name, "--run-dir", str(run_dir), *options]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        log.stop()
    if done.returncode:
        raise ExampleError(f"journeywork {name} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def supervised_step(
    run_dir: Path, config: Path, settings: Mapping[str, Any], up_flags: Sequence[str], rows: list[Any], *tuning: str
) -> None:
    """Train the base model on conversations, `rows` of `messages`, by `journeywork train`: step 1 of the history."""
    folder = run_dir / "examples"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    on_the_log(run_dir, config, settings, up_flags, "train", "--on", str(folder), "--as", "sft", *tuning)


def _largest_memory_mb(pid: int) -> float:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) / 1000


def disk_mb(folder: Path) -> float:
    """Return what the files of a folder take on the disk, in MB."""
    return round(sum(file.lstat().st_blocks for file in folder.rglob("*")) * 512 / 1e6, 1)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `journeywork up` is given too: `flags` returns them."""
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="any setting")
    parser.add_argument("--vllm-url", help="an inference server that serves the base model already")


def flags(args: argparse.Namespace) -> list[str]:
    """Return what `add_flags` read, as flags of `journeywork up`."""
    settings = [part for given in args.set for part in ("--set", given)]
    return settings + (["--vllm-url", args.vllm_url] if args.vllm_url else [])


def fast_bfloat16() -> bool:
    """Return whether this machine's processors multiply bfloat16 in hardware. Elsewhere it is several times slower than
    float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text("ascii", "replace")
    except OSError:
        return False
    return any(f" {name} " in flags or f" {name}\n" in flags for name in ("avx512_bf16", "amx_bf16", "bf16"))


def agent(run: Trajectory) -> openai.AsyncOpenAI:
    """Return the client with which an agent plays a run."""
    return _POOL.with_options(base_url=run.base_url, api_key=run.api_key)


async def served_step(client: AsyncJourneywork, model: str) -> int:
    """Return the policy step that answers the model's calls now; 0 is the base model."""
    (step,) = (entry["step"] for entry in await client.policies() if entry["model"] == model)
    return int(step)


@contextlib.contextmanager
def as_program(run_dir: Path) -> Iterator[None]:
    """Run an example within the block: it stops the installation that it started when it is told to end, and ends the
    program with 1 after an `ExampleError`, which is printed."""
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
    """Keep an earlier run of this folder beside it, under the time of its last change. Raises `ExampleError` if its
    installation still runs: it would go on in the new folder."""
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
