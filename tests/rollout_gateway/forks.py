"""Gateways as forks of one process that has imported what they import: a start costs a tenth of the processor time."""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
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


def start(settings: Path, log: Path, crash_at: str) -> tuple[BaseProcess, bytes]:
    """Start a gateway. `crash_at`: as `crash.arm` takes it. Returns its process, and the line that it said when it was
    ready; none if it ended before."""
    reading, writing = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_run, args=(settings, log, writing, dict(os.environ), crash_at), daemon=True)
    process.start()
    writing.close()
    with reading, os.fdopen(os.dup(reading.fileno()), "rb") as pipe:
        return process, pipe.readline()
