"""Who may use a run directory: one installation at a time.

`journeyman up` holds `<run_dir>/up.lock` for itself, from before it writes anything until it ends; the kernel releases it however the
process ends. Its children do not inherit that lock. They inherit another, `<run_dir>/processes.lock`: while one of them lives, the
next `up` knows, ends it, and starts only then. So two NATS servers never write to one folder, also where `up` was killed and its
children are still on their way out. `journeyman exec` and `journeyman prepare` share `up.lock` with each other, and not with `up`.
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

_UP, _PROCESSES, _NATS = "up.lock", "processes.lock", "nats.lock"


class RunInUseError(ConfigError):
    """Another process uses the run directory; the message names both."""


def private(run_dir: Path) -> None:
    """Make the run directory, for its owner only. Raises `ConfigError` where that is not possible."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        run_dir.chmod(0o700)  # one from before may be open to all
    except OSError as error:
        raise ConfigError(f"run_dir: {run_dir} can't be used: {error.strerror}") from error


def share(run_dir: Path) -> int:
    """Keep `journeyman up` from the run directory for as long as the returned file descriptor is open, here or in a child that
    inherits it. Several processes may do so at once. Raises `RunInUseError` where `up` runs there."""
    return _lock(run_dir, fcntl.LOCK_SH)


def for_server(run_dir: Path, server: str) -> None:
    """As `share`, until this process and the server that it becomes end. A NATS server has the directory's log to itself, several
    vLLM servers may use one directory. Raises `RunInUseError`."""
    os.set_inheritable(share(run_dir), True)
    if server != "nats":
        return
    held = _open(run_dir / _NATS)
    if not _try(held, fcntl.LOCK_EX):
        raise RunInUseError(_refusal(run_dir, _NATS, "journeyman exec nats"))
    os.set_inheritable(held, True)


@contextmanager
def hold(run_dir: Path) -> Iterator[int]:
    """The run directory for one `journeyman up`. Yields a file descriptor that every child has to inherit.

    What a killed `up` left behind is ended first. Raises `RunInUseError` where another process uses the directory."""
    ours = _lock(run_dir, fcntl.LOCK_EX)
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


def _try(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock(run_dir: Path, how: int) -> int:
    fd = _open(run_dir / _UP)
    if _try(fd, how):
        return fd
    # Who shares the lock is a server of `journeyman exec`; nobody can share it with `up`.
    what = "a server of journeyman exec" if _try(fd, fcntl.LOCK_SH) else "journeyman up"
    os.close(fd)
    raise RunInUseError(_refusal(run_dir, _UP, what))


def _refusal(run_dir: Path, lock: str, what: str) -> str:
    holders = sorted(_holders(run_dir / lock))
    # A process of another user, or of another container, holds the lock unseen.
    who = f"as process {holders[0]}" if holders else "as a process that can't be seen from here"
    return f"{run_dir} is in use: {what} runs there {who}; stop it first or choose another run_dir"


def _holders(path: Path) -> list[int]:
    """Processes besides this one that have the file open, as far as this user may know."""
    wanted, found = path.stat(), []
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) == os.getpid():
            continue
        with suppress(OSError):  # a process that just ended, or another user's
            for link in (folder / "fd").iterdir():
                with suppress(OSError):
                    if os.path.samestat(link.stat(), wanted):
                        found.append(int(folder.name))
                        break
    return found


def _end_leftovers(run_dir: Path, fd: int) -> None:
    """Kill the children of an `up` that is no more, and return once they are gone and the lock is ours.

    They were told to end when their parent died. All of them survive a kill, so they are not waited for."""
    while not _try(fd, fcntl.LOCK_EX):
        holders = _holders(run_dir / _PROCESSES)
        if not holders and not _try(fd, fcntl.LOCK_EX):
            raise RunInUseError(
                _refusal(run_dir, _PROCESSES, "a server or service of an ended journeyman up")
            )
        for pid in holders:
            _kill(pid)


def _kill(pid: int) -> None:
    """Kill a process with its group, and return once it is gone."""
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
