"""Starts a child process that ends with its parent and reports readiness and heartbeats through a pipe
(`pipeline.running.service`), and ends one that hangs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

import anyio
import anyio.abc

_ABORT_S = 1.0
"""How long a process may take to write its stacks and end."""

# PR_SET_PDEATHSIG, then become the command: a killed parent leaves no orphan. uvloop has no option for the umask.
_LAUNCH = (
    "import ctypes,os,sys;os.umask(0o77);ctypes.CDLL(None).prctl(1,15);"
    "os.getppid()==int(sys.argv[1]) or sys.exit(1);os.execv(sys.argv[2],sys.argv[2:])"
)


async def launch(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    sink: IO[bytes] | None = None,
    handles: Sequence[int] = (),
    reports: bool = True,
) -> tuple[anyio.abc.Process, int]:
    """Start a process that gets SIGTERM if this one ends. Returns it and the end of the pipe that it reports to.

    `sink`: file for its output; `None`: this process's. `handles`: file descriptors that it inherits. `reports`: it is
    a service, and gets `--ready-fd`. It does not get this process's Ctrl-C."""
    read_end, write_end = os.pipe()
    more = ["--ready-fd", str(write_end)] if reports else []
    try:
        process = await anyio.open_process(
            [sys.executable, "-S", "-c", _LAUNCH, str(os.getpid()), *argv, *more],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=dict(env),
            start_new_session=True,
            pass_fds=(write_end, *handles),
        )
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    return process, read_end


async def is_ready(fd: int) -> bool:
    """Wait until a service reports readiness. Returns false if it ended before."""
    await anyio.wait_readable(fd)
    return bool(os.read(fd, 65536))


async def abort(process: anyio.abc.Process) -> None:
    """Have a Python process that hangs write the stacks of its threads to its log, and end."""
    process.send_signal(signal.SIGABRT)
    with anyio.move_on_after(_ABORT_S):
        await process.wait()
