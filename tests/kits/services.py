"""Programs and services of Journeywork as processes, for tests and benchmarks."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeVar

import psutil

from pipeline.config import Config
from pipeline.config import save as save_config

ROOT = Path(__file__).parents[2]


class Startable(Protocol):
    def start(self) -> None: ...
    def stop(self) -> None: ...


S = TypeVar("S", bound=Startable)


@contextlib.contextmanager
def serving(server: S) -> Iterator[S]:
    """Run a server within the block."""
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Keep this thread, and the programs that it starts, on one core within the block, where there are two."""
    before = os.sched_getaffinity(0)
    if core in before:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def running(
    *command: str, log: Path, core: int | None = None, stdout: bool = False
) -> Iterator[tuple[psutil.Process, str]]:
    """Start a program, wait until it is ready, and end it after the block. Yields the process and the line with which
    it said that it is ready: on standard output with `stdout`, else on `--ready-fd`, as services do.

    Raises `RuntimeError` with the end of its log if it ends before, or if a service does not stop in order."""
    reading, writing = os.pipe()
    more = [] if stdout else ["--ready-fd", str(writing)]
    with log.open("ab") as sink, on_core(core):
        process = subprocess.Popen(
            [*command, *more],
            stdout=writing if stdout else sink,
            stderr=sink,
            pass_fds=(writing,),
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    os.close(writing)
    try:
        with os.fdopen(reading) as pipe:
            line = pipe.readline()
            if not line:
                raise RuntimeError(f"{' '.join(command)} did not start: {log.read_text()[-3000:]}")
            yield psutil.Process(process.pid), line
    finally:
        process.terminate()
        code = process.wait()
    if code and not stdout:
        raise RuntimeError(f"{' '.join(command)} did not stop in order: {log.read_text()[-3000:]}")


def service(module: str, config: Config, core: int | None = None) -> AbstractContextManager[tuple[psutil.Process, str]]:
    """Run a service of Journeywork with these settings, as `running` does."""
    settings = config.path("config.toml")
    save_config(config, settings)
    log = config.path(f"{module.partition('.')[0]}.log")
    return running(sys.executable, "-m", module, "--config", str(settings), log=log, core=core)
