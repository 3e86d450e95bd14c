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
    output: IO[bytes] | None = None,
    inherited_fds: Sequence[int] = (),
    is_service: bool = True,
) -> tuple[anyio.abc.Process, int]:
    """Start a process, which gets SIGTERM when this one ends. It has a session of its own, so this process's Ctrl-C
    does not reach it. Returns the process, and the read end of the pipe on which a service reports.

    `output`: file for what it prints; `None`: where this process prints. `is_service`: it takes `--ready-fd`."""
    read_end, write_end = os.pipe()
    ready_option = ["--ready-fd", str(write_end)] if is_service else []
    try:
        process = await anyio.open_process(
            [sys.executable, "-S", "-c", _LAUNCH, str(os.getpid()), *argv, *ready_option],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(env),
            start_new_session=True,
            pass_fds=(write_end, *inherited_fds),
        )
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    return process, read_end


async def wait_until_ready(fd: int) -> bool:
    """Wait for the first bytes in the pipe `fd` of a service. Returns true when it reports readiness, false if it ended
    before."""
    await anyio.wait_readable(fd)
    return bool(os.read(fd, 65536))


async def abort(process: anyio.abc.Process) -> None:
    """End a Python process that hangs by SIGABRT, on which its fault handler writes the stacks of its threads to its
    log. Returns after `_ABORT_S` even if it has not ended."""
    process.send_signal(signal.SIGABRT)
    with anyio.move_on_after(_ABORT_S):
        await process.wait()
