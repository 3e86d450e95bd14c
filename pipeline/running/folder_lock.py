"""Locks of a run directory: one installation uses it at a time.

`journeywork up` holds `<run_dir>/up.lock` exclusively, from before it writes anything until it ends. Its children
inherit the lock, so that it is free only when all of them have ended, also if `up` was killed: the kernel then sends
them SIGTERM (`pipeline.running.child`). So two NATS servers never write to one folder. `journeywork exec` and
`journeywork prepare` share the lock with each other, and not with `up`. `journeywork backup` locks as `up` does.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.config import ConfigError
from pipeline.files import try_lock

_UP, _NATS = "up.lock", "nats.lock"
"""The files that are locked: against another installation, and against another NATS server of `journeywork exec`."""


class InstallationInUseError(ConfigError):
    """Another process uses the run directory. The message names both."""


def make_private(run_dir: Path) -> None:
    """Create the run directory, readable by its owner only. Raises `ConfigError` if that fails."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        run_dir.chmod(0o700)  # an existing one may be readable by all
    except OSError as error:
        raise ConfigError(f"run_dir: {run_dir} can't be used: {error.strerror}") from error


def lock_shared(run_dir: Path) -> int:
    """Lock the run directory against `journeywork up`, until the returned file descriptor is closed here and in
    every child that inherits it. Several processes may share the lock. Raises `InstallationInUseError` if `up` runs
    there, or children of a killed one."""
    return _lock(run_dir, _UP, fcntl.LOCK_SH)


def lock_for_server(run_dir: Path, server: str) -> None:
    """Lock the run directory against `journeywork up`, until this process ends, also as the `server` (`nats` or `vllm`)
    that it becomes by `exec`. Several vLLM servers may share a directory, but only one NATS server. Raises
    `InstallationInUseError`."""
    os.set_inheritable(lock_shared(run_dir), True)
    if server == "nats":
        os.set_inheritable(_lock(run_dir, _NATS, fcntl.LOCK_EX, "journeywork exec nats"), True)


@contextmanager
def lock_exclusively(run_dir: Path, command: str = "journeywork up") -> Iterator[int]:
    """Lock the run directory against all others within the block. `command` is named in their errors. Yields a file
    descriptor that every child must inherit. Raises `InstallationInUseError` if another process uses the directory."""
    lock = _lock(run_dir, _UP, fcntl.LOCK_EX, command)
    try:
        yield lock
    finally:
        os.close(lock)


def _lock(run_dir: Path, name: str, lock_type: int, command: str = "") -> int:
    """Lock the file `name` of the run directory and return its file descriptor. `lock_type`: `fcntl.LOCK_SH` or
    `LOCK_EX`. `command`: who has the lock, for the error of those that are refused; an exclusive lock writes it into
    the file. Raises `ConfigError`, and `InstallationInUseError` if another process has the lock."""
    path = run_dir / name
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"run_dir: {path} can't be written: {error.strerror}") from error
    if not try_lock(fd, lock_type):
        shared = try_lock(fd, fcntl.LOCK_SH)
        holder = "journeywork prepare or a server of journeywork exec" if shared else os.pread(fd, 100, 0).decode()
        os.close(fd)
        raise InstallationInUseError(
            f"{run_dir} is in use: {holder or 'journeywork up'} runs there; stop it first or choose another run_dir"
        )
    if lock_type == fcntl.LOCK_EX:
        os.truncate(fd, 0)
        os.pwrite(fd, f"{command} (process {os.getpid()}, or what it started)".encode(), 0)
    return fd
