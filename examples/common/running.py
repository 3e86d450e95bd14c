"""What an example's script needs around its agent: flags and a running installation.

    args = running.arguments(__doc__, MODEL, steps=40, held_out=200, base=BASE)
    async with running.installation(args, SETTINGS) as client:
        ...
        compared = await client.evaluate([f"{MODEL}@0", f"{MODEL}@{args.steps}"], held_out, play)
    curve.report(args, compared)

An example is a folder with `train.py`, the script, and `make_model.py`, which makes its tiny base model.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import openai
import psutil

from journeywork import AsyncJourneywork, Trajectory
from pipeline.running.state import read_state

ROOT = Path(__file__).resolve().parents[2]
JOURNEYWORK = str(Path(sys.executable).with_name("journeywork"))
TWO_CORES = Path(__file__).with_name("two_cores.toml")
GPU = ROOT / "deploy" / "journeywork.toml"
LOOK_EVERY_S = 0.2
"""Seconds between two looks at the installation's state while it starts."""

GROUP_SIZE = 8
GROUPS_PER_STEP = 8
CONCURRENCY = 32
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

    def restarts(self) -> int:
        """Return how often services were started again."""
        state = json.loads((self.run_dir / "state.json").read_text())
        return sum(service["restarts"] for service in state["services"].values())

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


def arguments(
    doc: str | None, name: str, *, steps: int, held_out: int, base: str | None = None, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Read an example's flags. `steps`, `held_out` (number of tasks) and `base` are the defaults of the flags with
    these names. The result also has `name`, the name of the example and of its model, and `command`, the command
    line."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the training tasks and of the trainer")
    parser.add_argument("--run-dir", type=Path, default=Path(f"runs/{name}"))
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps")
    parser.add_argument("--held-out", type=int, default=held_out, help="number of held-out tasks")
    parser.add_argument("--base", default=base, help="folder of a base model; default: a tiny one, made first")
    parser.add_argument(
        "--config",
        type=Path,
        help="settings; default: two_cores.toml for the tiny model, deploy/journeywork.toml for another one",
    )
    add_flags(parser)
    given = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(given)
    args.name = name
    args.command = shlex.join(["python", "-m", f"examples.{name}.train", *given])
    return args


def config_of(args: argparse.Namespace) -> Path:
    """Return the file of settings that the flags name, or that suits the base model."""
    chosen: Path = args.config or (GPU if args.base else TWO_CORES)
    return chosen


def base_model(name: str) -> Path:
    """Return the folder of the example's tiny base model. If it is missing, run the example's `make_model` first."""
    folder = ROOT / "runs" / "models" / name
    if not folder.exists():
        command = [sys.executable, "-m", f"examples.{name}.make_model", "--out", str(folder)]
        print(f"making the base model in {folder}, in about a minute", flush=True)
        subprocess.run(command, check=True, cwd=ROOT)
    return folder


def fast_bfloat16() -> bool:
    """Return whether this machine's processors multiply bfloat16 in hardware. Elsewhere it is several times slower than
    float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text("ascii", "replace")
    except OSError:
        return False
    return any(f" {name} " in flags or f" {name}\n" in flags for name in ("avx512_bf16", "amx_bf16", "bf16"))


@contextlib.asynccontextmanager
async def installation(args: argparse.Namespace, settings: Mapping[str, Any]) -> AsyncIterator[AsyncJourneywork]:
    """Run `journeywork up` with the example's model and settings (by dotted names), and yield a client of its gateway.

    Raises `ExampleError` if it does not come up. It is stopped when the block ends, and its history is complete
    then."""
    base = Path(args.base) if args.base else await anyio.to_thread.run_sync(base_model, args.name)
    make_room(args.run_dir)
    overrides = {
        "models.0.name": args.name,
        "models.0.base": str(base),
        "judge.group_size": GROUP_SIZE,
        "trainer.groups_per_step": GROUPS_PER_STEP,
        "trainer.max_steps": args.steps,
        **({} if args.base else {"trainer.optimizer.schedule": "linear"}),
        "trainer.seed": args.seed,
        **settings,
    }
    up = Installation(args.run_dir.absolute(), config_of(args), overrides, *flags(args))
    try:
        async with AsyncJourneywork(await up.ready()) as client:
            yield client
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(up.stop)


def agent(run: Trajectory) -> openai.AsyncOpenAI:
    """Return the client with which an agent plays a run."""
    return _POOL.with_options(base_url=run.base_url, api_key=run.api_key)


async def served_step(client: AsyncJourneywork, model: str) -> int:
    """Return the policy step that answers the model's calls now; 0 is the base model."""
    (step,) = (entry["step"] for entry in await client.policies() if entry["model"] == model)
    return int(step)


async def newest_version(client: AsyncJourneywork, model: str) -> str:
    """Return the newest version of the model, whatever the model's name stands for."""
    (newest,) = (entry["newest"] for entry in await client.policies() if entry["model"] == model)
    return str(newest)


def stop_when_told() -> None:
    """Let SIGTERM end this program as Ctrl-C does, so that it stops the installation that it started."""
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


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
