"""Locks of a run directory: one installation uses it at a time.

`journeywork up` holds `<run_dir>/up.lock` exclusively, from before it writes anything until it ends. The kernel
releases the lock when the process ends, also when it is killed. Its children do not inherit that lock. They inherit
another, `<run_dir>/processes.lock`: while it is held, the next `up` ends the children first and starts then. So two
NATS servers never write to one folder, even if `up` was killed and its children still run. `journeywork exec` and
`journeywork prepare` share `up.lock` with each other, and not with `up`; beside children of a killed `up` they are
refused. `journeywork backup` locks as `up` does.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.config import ConfigError
from pipeline.files import try_lock

_UP, _PROCESSES, _NATS = "up.lock", "processes.lock", "nats.lock"
_LEFTOVER = "a server or service of an ended journeywork up"


class RunInUseError(ConfigError):
    """Another process uses the run directory. The message names both."""


def make_private(run_dir: Path) -> None:
    """Create the run directory, readable by its owner only. Raises `ConfigError` if that fails."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        run_dir.chmod(0o700)  # an existing one may be readable by all
    except OSError as error:
        raise ConfigError(f"run_dir: {run_dir} can't be used: {error.strerror}") from error


def share(run_dir: Path) -> int:
    """Lock the run directory against `journeywork up`, until the returned file descriptor is closed here and in
    every child that inherits it. Several processes may share the lock. Raises `RunInUseError` if `up` runs
    there, or children of a killed one."""
    lock = _lock(run_dir, fcntl.LOCK_SH)
    if (run_dir / _PROCESSES).exists():
        processes = _open(run_dir / _PROCESSES)
        free = try_lock(processes, fcntl.LOCK_SH)
        os.close(processes)
        if not free:
            os.close(lock)
            raise RunInUseError(_refusal(run_dir, _PROCESSES, _LEFTOVER))
    return lock


def for_server(run_dir: Path, server: str) -> None:
    """As `share`, until this process and the server that it becomes end. A NATS server has the directory's log to
    itself, several vLLM servers may use one directory. Raises `RunInUseError`."""
    os.set_inheritable(share(run_dir), True)
    if server != "nats":
        return
    lock = _open(run_dir / _NATS)
    if not try_lock(lock, fcntl.LOCK_EX):
        raise RunInUseError(_refusal(run_dir, _NATS, "journeywork exec nats"))
    os.set_inheritable(lock, True)


@contextmanager
def hold(run_dir: Path, command: str = "journeywork up") -> Iterator[int]:
    """Lock the run directory for one `journeywork up` or another `command`. Yields a file descriptor that every child
    must inherit.

    Children of a killed `up` are ended first. Raises `RunInUseError` if another process uses the directory."""
    ours = _lock(run_dir, fcntl.LOCK_EX)
    os.truncate(ours, 0)
    os.pwrite(ours, command.encode(), 0)  # for the message of those that are refused
    processes = _open(run_dir / _PROCESSES)
    try:
        _end_leftovers(run_dir, processes)
        yield processes
    finally:
        os.close(processes)
        os.close(ours)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"run_dir: {path} can't be written: {error.strerror}") from error


def _lock(run_dir: Path, how: int) -> int:
    fd = _open(run_dir / _UP)
    if try_lock(fd, how):
        return fd
    shared = try_lock(fd, fcntl.LOCK_SH)
    command = os.pread(fd, 100, 0).decode() or "journeywork up"
    what = "journeywork prepare or a server of journeywork exec" if shared else command
    os.close(fd)
    raise RunInUseError(_refusal(run_dir, _UP, what))


def _refusal(run_dir: Path, lock: str, what: str) -> str:
    holders = sorted(_holders(run_dir / lock))
    # A process of another user or container may hold the lock without being visible here.
    who = f"as process {holders[0]}" if holders else "as a process that is not visible from here"
    return f"{run_dir} is in use: {what} runs there {who}; stop it first or choose another run_dir"


def _holders(path: Path) -> list[int]:
    """Return the other processes that have the file open, as far as this user may see them."""
    wanted, holders = path.stat(), []
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) == os.getpid():
            continue
        with suppress(OSError):  # a process that just ended, or another user's
            for link in (folder / "fd").iterdir():
                with suppress(OSError):
                    if os.path.samestat(link.stat(), wanted):
                        holders.append(int(folder.name))
                        break
    return holders


def _end_leftovers(run_dir: Path, fd: int) -> None:
    """Kill the children of an `up` that has ended, and return when they are gone and the lock is held here.

    They may be killed without waiting: every service recovers from the log."""
    while not try_lock(fd, fcntl.LOCK_EX):
        holders = _holders(run_dir / _PROCESSES)
        if not holders and not try_lock(fd, fcntl.LOCK_EX):
            raise RunInUseError(_refusal(run_dir, _PROCESSES, _LEFTOVER))
        for pid in holders:
            _kill(pid)


def _kill(pid: int) -> None:
    """Kill a process and its group, and return when it is gone."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [])
    finally:
        os.close(process)
