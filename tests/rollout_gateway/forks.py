"""Gateways as forks of one process that has imported what they import: a start costs a tenth of the processor time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from pipeline import crash
from pipeline.running.service import main

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["rollout_gateway.service"])


def _run(settings: Path, log: Path, ready: Connection, environment: dict[str, str], crash_at: str) -> None:
    """Be `python -m rollout_gateway`."""
    from rollout_gateway.service import check, serve  # the process that forks has it

    os.environ.clear()
    os.environ.update(environment)
    sink = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(sink, stream)
    crash.arm(crash_at)
    sys.argv[1:] = ["--config", str(settings), "--ready-fd", str(ready.fileno())]
    main("rollout_gateway", serve, check)


class ForkedGateway:
    """A gateway's process, with those methods of `subprocess.Popen` that tests call."""

    def __init__(self, settings: Path, log: Path, crash_at: str) -> None:
        """Start it. `crash_at`: as `crash.arm` takes it. `first_line` is what it said when it was ready, or nothing if
        it ended before."""
        reading, writing = _FORKS.Pipe(duplex=False)
        arguments = (settings, log, writing, dict(os.environ), crash_at)
        self._process = _FORKS.Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        writing.close()
        with os.fdopen(os.dup(reading.fileno()), "rb") as pipe:
            self.first_line = pipe.readline()
        reading.close()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("gateway", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, which is not told yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
