"""Starts the log, a gateway, an instant inference server and a closed-loop client, and measures the gateway's CPU time.

Server and client are one program in C (`gateway_load.c`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil

from pipeline.config import Config, GatewayConfig, ModelConfig, NatsConfig, VllmConfig, with_values
from pipeline.config import save as save_config
from pipeline.events import TrajectoryOpened
from pipeline.log.broker import Broker
from tests.kits.sampler import SamplerThread

HERE = Path(__file__).parent
CONNECTIONS = 32
STREAMS = 1000
PATH = "/v1/chat/completions"
TRIES = 5
"""Number of runs. The best one counts, because other work on the machine can only slow a run down."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pinned(core: int) -> list[str]:
    """Prefix that keeps a command on one core, where there are two."""
    return ["taskset", "-c", str(core)] if (os.cpu_count() or 1) > 1 and shutil.which("taskset") else []


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """This process on one core, where there are two."""
    before = os.sched_getaffinity(0)
    if core in before:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass
class Measured:
    """One run of the client against one proxy."""

    load: dict[str, Any]
    cpu_s: float

    @property
    def whole(self) -> bool:
        """Whether some calls were answered and none failed."""
        load = self.load
        return bool(load["requests"] or load["chunks"]) and not load["failed"] and not load["closed"]

    @property
    def rps(self) -> float:
        return float(self.load["requests"] / self.load["seconds"])

    @property
    def per_core(self) -> float:
        """Calls per second of the proxy's CPU time."""
        return float(self.load["requests"] / self.cpu_s) if self.cpu_s else 0.0

    @property
    def chunks_per_core(self) -> float:
        return float(self.load["chunks"] / self.cpu_s) if self.cpu_s else 0.0


@dataclass
class Target:
    """Something that answers calls."""

    name: str
    port: int
    process: psutil.Process | None = None
    path: str = PATH


class Bench:
    """The programs, files and processes of one benchmark."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self.program = folder / "gateway_load"
        subprocess.run(["cc", "-O2", "-o", str(self.program), str(HERE / "gateway_load.c")], check=True)
        self.plain_body = self._body("plain.json", stream=False)
        self.stream_body = self._body("stream.json", stream=True)
        self.upstream_port = 0
        self._together = False

    def _body(self, name: str, *, stream: bool) -> Path:
        body = {"model": "policy", "stream": stream, "messages": [{"role": "user", "content": "x" * 1940}]}
        path = self.folder / name
        path.write_text(json.dumps(body))
        return path

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Start all processes on one core within the block. With one call in flight only one process works at a time,
        and the figure does not include waking up an idle core."""
        self._together = True
        try:
            yield
        finally:
            self._together = False

    def core(self, core: int) -> int:
        """Return the core on which a process is started that asks for `core`."""
        return 0 if self._together else core

    @contextlib.contextmanager
    def process(
        self, command: list[str], *, core: int, ready: str, env: dict[str, str] | None = None
    ) -> Iterator[psutil.Process]:
        """Start a process, wait until `ready` (a URL, or host:port) answers, and end it afterwards."""
        log = self.folder / f"{Path(command[0]).name}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                pinned(self.core(core)) + command,
                stdout=out,
                stderr=out,
                cwd=self.folder,
                env={**os.environ, **(env or {})},
            )
        try:
            deadline = time.monotonic() + 90
            while not answers(ready):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{command[0]} did not start: {log.read_text()[-2000:]}")
                time.sleep(0.05)
            yield psutil.Process(process.pid)
        finally:
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()

    @contextlib.contextmanager
    def upstream(self, chunk_ms: float = 20.0) -> Iterator[None]:
        """Run the inference server behind the proxies within the block. It waits `chunk_ms` between the chunks of a
        stream."""
        before, self.upstream_port = self.upstream_port, free_port()
        command = [str(self.program), "serve", str(self.upstream_port), str(chunk_ms)]
        with self.process(command, core=1, ready=f"127.0.0.1:{self.upstream_port}"):
            yield
        self.upstream_port = before

    def load(
        self, port: int, *, path: str = PATH, connections: int = CONNECTIONS, stream: bool = False,
        header: str = "", proxy: psutil.Process | None = None, seconds: float = 0, numbers: int = 0,
    ) -> Measured:  # fmt: skip
        """Run the client once. `%d` in `path` becomes the connection's number, or each of `numbers` in turn."""
        body = self.stream_body if stream else self.plain_body
        command = [
            *pinned(self.core(1)), str(self.program), "load", str(port), path, str(connections),
            str(seconds or self.seconds), str(body), header, str(numbers),
        ]  # fmt: skip
        before = cpu_seconds(proxy)
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return Measured(json.loads(done.stdout), cpu_seconds(proxy) - before)

    def race(
        self, targets: Sequence[Target], *, warm_s: float = 1.0, **options: Any
    ) -> dict[str, list[Measured]]:
        """Return the runs of each target, by name. After a warm-up the targets take turns, so that other work on the
        machine affects all of them. Raises `RuntimeError` if a call fails."""
        for target in targets:
            self.load(target.port, **{**options, "path": target.path, "seconds": warm_s})
        runs: dict[str, list[Measured]] = {target.name: [] for target in targets}
        for _ in range(TRIES):
            for target in targets:
                run = self.load(target.port, path=target.path, proxy=target.process, **options)
                if not run.whole:
                    raise RuntimeError(f"{target.name}: calls failed: {run.load}")
                runs[target.name].append(run)
        return runs

    @contextlib.contextmanager
    def nats(self) -> Iterator[str]:
        """Run a NATS server within the block; yield its URL."""
        port = free_port()
        settings, store = self.folder / "nats.conf", self.folder / f"js-{port}"
        settings.write_text(f'host: 127.0.0.1\nport: {port}\njetstream {{ store_dir: "{store}" }}\n')
        binary = str(Path(sys.executable).with_name("nats-server"))
        with self.process([binary, "-c", str(settings)], core=1, ready=f"127.0.0.1:{port}"):
            yield f"nats://127.0.0.1:{port}"
        shutil.rmtree(store)

    @contextlib.contextmanager
    def gateway(self, nats_url: str, capture: str, name: str, trajectories: int = 0) -> Iterator[Target]:
        """Run a gateway and a sampler agent within the block, with `trajectories` open. With `capture` its calls are
        those of the trajectories `b<number>`."""
        port = free_port()
        config = Config(
            project="bench",
            run_dir=str(self.folder / name),
            log_level="WARNING",
            nats=NatsConfig(url=nats_url),
            vllm=VllmConfig(urls=(f"http://127.0.0.1:{self.upstream_port}",)),
            models=(ModelConfig(name="policy"),),
            gateway=GatewayConfig(port=port, capture=capture),  # type: ignore[arg-type]
        )
        settings = config.path("config.toml")
        save_config(config, settings)
        command = [sys.executable, "-m", "rollout_gateway", "--config", str(settings)]
        env = {"PYTHONPATH": str(HERE.parent)}
        agent = SamplerThread(with_values(config, {"run_dir": str(self.folder / f"{name}-sampler")}))
        with self.process(command, core=0, ready=f"http://127.0.0.1:{port}/health", env=env) as process:
            agent.start()
            try:
                anyio.run(_open_trajectories, config.nats, trajectories)
                yield Target(name, port, process, PATH if capture == "off" else f"/t/b%d{PATH}")
            finally:
                agent.stop()
        shutil.rmtree(config.run_dir)


async def _open_trajectories(nats: NatsConfig, count: int) -> None:
    async with Broker.connect(nats) as broker:
        for number in range(count):
            await broker.publish(
                TrajectoryOpened(project="bench", trajectory=f"b{number}", model="policy", group="g")
            )


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


def answers(ready: str) -> bool:
    try:
        if ready.startswith("http"):
            return httpx.get(ready, timeout=2).status_code < 500
        host, _, port = ready.partition(":")
        with socket.create_connection((host, int(port)), 1):
            return True
    except (OSError, httpx.HTTPError):
        return False
