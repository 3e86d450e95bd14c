"""The bubblewrap command of a sandboxed reward function.

The function sees the system's libraries, Python, the folders of its search path and what `judge.rewards.readable`
names, all of it read-only and without the run directory. It has no network and sees no other process.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

INSTALL = "install bubblewrap (Debian and Ubuntu: apt-get install bubblewrap)"

_SYSTEM = (
    "/usr",
    "/bin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/sys/devices/system/cpu",
)
# Root gets a user namespace too, so that no process inside has a capability outside.
_NAMESPACES = (
    "--unshare-all",
    "--unshare-user",
    "--die-with-parent",
    "--new-session",
    "--as-pid-1",
    "--cap-drop",
    "ALL",
)


def unavailable() -> str:
    """Return why bubblewrap cannot be used on this machine, or an empty string. Tried once per process."""
    bwrap = shutil.which("bwrap")
    return _try_bwrap(bwrap) if bwrap else f"bubblewrap is not installed: {INSTALL}"


@functools.cache
def _try_bwrap(bwrap: str) -> str:
    python = command((), (), [sys.executable, "-I", "-c", ""])
    tried = subprocess.run(python, capture_output=True, text=True, check=False, timeout=30)
    if tried.returncode == 0:
        return ""
    return f"{bwrap} does not work here: {tried.stderr.strip() or f'exit code {tried.returncode}'}"


def search_path() -> list[str]:
    """Return the `sys.path` of a reward function: the working directory, then that of this process."""
    # It is on the path of scripts in this folder, whose names would shadow others.
    beside = str(Path(__file__).parent)
    paths = [str(Path.cwd()), *(str(Path(p).absolute()) for p in sys.path if p and p != beside)]
    return list(dict.fromkeys(paths))


def command(readable: Iterable[str], hidden: Iterable[str], argv: list[str]) -> list[str]:
    """Return the command that runs `argv` in a sandbox which shows the files and folders `readable`, read-only.

    `hidden` are folders (the run directory) that are shown empty even if they are within something readable."""
    # A virtual environment may be a link.
    prefixes = (sys.prefix, str(Path(sys.prefix).resolve()), sys.base_prefix)
    python = (*prefixes, str(Path(sys.executable).resolve()))
    shown: list[Path] = []
    candidates = {Path(os.path.abspath(p)) for p in (*_SYSTEM, *python, *readable)}  # noqa: PTH100 - links stay
    for place in sorted(candidates, key=lambda p: len(p.parts)):
        if place.exists() and not any(place.is_relative_to(outer) for outer in shown):
            shown.append(place)
    empty = {seen for h in hidden for seen in (Path(h).absolute(), Path(h).resolve()) if seen.is_dir()}
    mounts = [option for place in shown for option in ("--ro-bind", str(place), str(place))]
    mounts += ["--proc", "/proc", "--dev", "/dev"]
    for folder in (f for f in empty if any(f.is_relative_to(place) for place in shown)):
        mounts += ["--tmpfs", str(folder), "--remount-ro", str(folder)]
    mounts += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    return [shutil.which("bwrap") or "bwrap", *_NAMESPACES, *mounts, "--", *argv]
