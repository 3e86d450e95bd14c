"""Puts a proxy under load between an instant inference server and a closed-loop client, and measures its CPU time.

Server and client are one program in C (`gateway_load.c`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

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
class Proxy:
    """Something that answers calls."""

    name: str
    port: int
    process: psutil.Process | None = None
    path: str = PATH
    peer: bool = True
    """Whether the proxy is another project's. Its failed calls do not end the benchmark."""


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
        self, proxies: Sequence[Proxy], *, warm_s: float = 1.0, **options: Any
    ) -> dict[str, list[Measured]]:
        """Return the runs of each proxy, by name. After a warm-up the proxies take turns, so that other work on
        the machine affects all of them. A peer's run with failed calls is left out; a failed run of the gateway
        raises."""
        for proxy in proxies:
            self.load(proxy.port, **{**options, "path": proxy.path, "seconds": warm_s})
        runs: dict[str, list[Measured]] = {proxy.name: [] for proxy in proxies}
        for _ in range(TRIES):
            for proxy in proxies:
                run = self.load(proxy.port, path=proxy.path, proxy=proxy.process, **options)
                if run.whole:
                    runs[proxy.name].append(run)
                elif not proxy.peer:
                    raise RuntimeError(f"{proxy.name}: calls failed: {run.load}")
        return runs


def cpu_seconds(process: psutil.Process | None) -> float:
    """CPU seconds of a process and its descendants."""
    if process is None:
        return 0.0
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
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
