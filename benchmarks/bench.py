"""What the benchmarks share: they start the log and load, measure processes, and write their results.

`Bench` has an instant inference server and a closed-loop client, which are one program in C (`gateway_load.c`).
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import psutil

from pipeline.config import Config, GatewayConfig, ModelConfig, NatsConfig, VllmConfig
from pipeline.events import TrajectoryOpened
from pipeline.log.broker import Broker
from tests.conftest import NatsServer, free_port
from tests.kits.sampler import SamplerThread
from tests.kits.services import on_core, running, service, serving

HERE = Path(__file__).parent
PATH = "/v1/chat/completions"
RESULTS = HERE / "results"
TRIES = 5
"""Number of runs. The best one counts, because other work on the machine can only slow a run down."""


def machine() -> dict[str, Any]:
    """Return what a result says of the machine that it was measured on."""
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def write_results(out: Path, figures: Mapping[str, Any]) -> None:
    """Print the figures, rounded to four places, and write them to `out`."""
    rounded = json.loads(json.dumps(figures), parse_float=lambda text: round(float(text), 4))
    text = json.dumps(rounded, indent=1)
    out.parent.mkdir(exist_ok=True)
    out.write_text(text + "\n")
    print(text)


@dataclass
class Target:
    """Something that answers calls."""

    name: str
    port: int
    process: psutil.Process | None = None
    path: str = PATH
    """`%d` in it becomes the connection's number."""


class Bench:
    """The programs, files and processes of one benchmark."""

    def __init__(self, folder: Path) -> None:
        """Compile the program of server and client, and write the bodies of its requests, into `folder`."""
        self.folder = folder
        self.program = folder / "gateway_load"
        subprocess.run(["cc", "-O2", "-o", str(self.program), str(HERE / "gateway_load.c")], check=True)
        self.bodies = {stream: folder / f"body-{stream}.json" for stream in (False, True)}
        for stream, path in self.bodies.items():
            body = {"model": "policy", "stream": stream, "messages": [{"role": "user", "content": "x" * 1940}]}
            path.write_text(json.dumps(body))
        self.upstream_port = free_port()

    @contextlib.contextmanager
    def upstream(self) -> Iterator[None]:
        """Run the inference server behind the proxies within the block. It waits 20 ms between the chunks of a
        stream."""
        command = (str(self.program), "serve", str(self.upstream_port), "20")
        with running(*command, log=self.folder / "load.log", core=1, stdout=True):
            yield

    def load(self, target: Target, connections: int, seconds: float, *, stream: bool) -> dict[str, Any]:
        """Run the client once. Returns what it counted, with `calls` and `streamed`: calls and chunks per second of the
        target's CPU time, or per second where that is not known."""
        before = cpu_seconds(target.process)
        with on_core(1):
            command = [self.program, "load", target.port, target.path, connections, seconds, self.bodies[stream]]
            done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
        run: dict[str, Any] = json.loads(done.stdout)
        spent = (cpu_seconds(target.process) - before) or run["seconds"]
        return run | {"calls": run["requests"] / spent, "streamed": run["chunks"] / spent}

    def race(
        self, targets: Sequence[Target], connections: int, seconds: float, *, stream: bool = False
    ) -> dict[str, list[dict[str, Any]]]:
        """Return the runs of each target, by name. After a warm-up the targets take turns, so that other work on the
        machine affects all of them. Raises `RuntimeError` if a call fails or none is answered."""
        for target in targets:
            self.load(target, connections, 1.0, stream=stream)
        runs: dict[str, list[dict[str, Any]]] = {target.name: [] for target in targets}
        for _ in range(TRIES):
            for target in targets:
                run = self.load(target, connections, seconds, stream=stream)
                if run["failed"] or run["closed"] or not (run["requests"] or run["chunks"]):
                    raise RuntimeError(f"{target.name}: calls failed: {run}")
                runs[target.name].append(run)
        return runs

    @contextlib.contextmanager
    def gateway(self, trajectories: int) -> Iterator[Target]:
        """Run a NATS server, a gateway and a sampler agent within the block, with the trajectories `b<number>` open,
        whose calls are captured."""
        with contextlib.ExitStack() as stack:
            with on_core(1):
                nats = NatsConfig(url=stack.enter_context(serving(NatsServer(self.folder / "nats"))).url)
            config = Config(
                project="bench",
                run_dir=str(self.folder / "gateway"),
                log_level="WARNING",
                nats=nats,
                vllm=VllmConfig(urls=(f"http://127.0.0.1:{self.upstream_port}",)),
                models=(ModelConfig(name="policy"),),
                gateway=GatewayConfig(port=free_port()),
            )
            process, _ = stack.enter_context(service("rollout_gateway", config, 0))
            stack.enter_context(serving(SamplerThread(config.replace(run_dir=str(self.folder / "sampler")))))
            anyio.run(_open_trajectories, nats, trajectories)
            yield Target("capture", config.gateway.port, process, f"/t/b%d{PATH}")


async def _open_trajectories(nats: NatsConfig, count: int) -> None:
    async with Broker.connect(nats) as broker:
        for number in range(count):
            await broker.publish(TrajectoryOpened(project="bench", trajectory=f"b{number}", model="policy", group="g"))


def cpu_seconds(process: psutil.Process | None) -> float:
    """CPU seconds of a process and its descendants."""
    if process is None:
        return 0.0
    total = 0.0
    for member in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            total += times.user + times.system
    return total


def peak_mb(process: psutil.Process) -> float:
    """Peak resident memory of a process and its descendants, in MB."""
    total = 0
    for member in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            status = Path(f"/proc/{member.pid}/status").read_text()
            total += int(status.partition("VmHWM:")[2].split()[0])
    return total / 1024
