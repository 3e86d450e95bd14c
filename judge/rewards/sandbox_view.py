"""What a sandboxed reward function can see, as arguments of bubblewrap.

The file system holds only Python, the system's libraries, the packages and modules of the search path, and what
`judge.rewards.readable` names, all of it read-only. There is no network, no other process, no device except /dev/null
and similar, no socket (`judge.rewards.sandbox_filter`), and no access to System V or POSIX message queues of the host.
Of a folder of the search path only importable modules are shown, because it often is the working directory, which
holds run directories with their secrets.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

INSTALL = "install bubblewrap (Debian and Ubuntu: apt-get install bubblewrap)"

_SYSTEM = (
    "/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/usr/local/lib", "/usr/share/zoneinfo",
    "/usr/share/misc", "/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d",
    "/etc/localtime", "/etc/mime.types", "/sys/devices/system/cpu",
)  # fmt: skip
_MERGED = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")
"""Links into /usr on most systems, folders on others."""
_CODE = (".py", ".pyc", ".so", ".zip", ".egg", ".whl")


@functools.cache
def _features(bwrap: str) -> tuple[str, ...]:
    """Return those options that only newer versions of bubblewrap have."""
    known = subprocess.run([bwrap, "--help"], capture_output=True, text=True, check=False)
    return tuple(o for o in ("--disable-userns",) if o in known.stdout + known.stderr)


def _namespaces(bwrap: str) -> list[str]:
    # Root gets a user namespace too, so that no process inside has a capability outside.
    return [
        bwrap, "--unshare-all", "--unshare-user", *_features(bwrap), "--die-with-parent", "--new-session", "--as-pid-1",
        "--cap-drop", "ALL",
    ]  # fmt: skip


_DEVICES = ("--proc", "/proc", "--dev", "/dev")


@functools.cache
def _try_bwrap(bwrap: str) -> str:
    try:
        tried = subprocess.run(
            command("os", [], (), (), [sys.executable, "-I", "-c", ""], None),
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    except subprocess.TimeoutExpired:
        return f"{bwrap} did not end within 30 s"
    if tried.returncode == 0:
        return ""
    return f"{bwrap} does not work here: {tried.stderr.strip() or f'exit code {tried.returncode}'}"


def unavailable() -> str:
    """Return why bubblewrap cannot be used on this machine, or an empty string. Tried once per process."""
    bwrap = shutil.which("bwrap")
    return _try_bwrap(bwrap) if bwrap else f"bubblewrap is not installed: {INSTALL}"


def search_path() -> list[str]:
    """Return the `sys.path` of a reward function: the working directory, then that of this process."""
    # It is on the path of scripts in this folder, whose names would shadow others.
    beside = str(Path(__file__).parent)
    paths = [str(Path.cwd()), *(str(Path(p).absolute()) for p in sys.path if p and p != beside)]
    return list(dict.fromkeys(paths))


def _is_code(entry: Path) -> bool:
    """Return whether an entry of a search-path folder is a module, a package or a package's `.libs`."""
    if entry.is_file():
        return entry.suffix in _CODE
    if not entry.name.removesuffix(".libs").isidentifier() or not entry.is_dir():
        return False
    try:
        return any(inner.suffix in _CODE for inner in entry.iterdir())
    except PermissionError:
        return False


def _modules(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if _is_code(entry))
    except (PermissionError, FileNotFoundError, NotADirectoryError):
        return []


def _origin(entry: str) -> list[Path]:
    """Return the location of the function's top-level module, which an import hook may find outside of the search
    path."""
    spec = importlib.util.find_spec(entry.partition(":")[0].partition(".")[0])
    if spec is None:
        return []
    if spec.submodule_search_locations:
        return [Path(p) for p in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.origin and spec.has_location else []


def readable(entry: str, path: Iterable[str], extra: Iterable[str]) -> list[Path]:
    """Return the files and folders that the function `entry` may read, outermost first, without repetition."""
    prefixes = {
        Path(sys.prefix),
        Path(sys.base_prefix),
        *(Path(sysconfig.get_path(n)) for n in ("stdlib", "purelib")),
    }
    # The prefix of a system's own Python is /usr or /usr/local; its library folders are enough.
    whole = [p for p in prefixes if p not in (Path("/usr"), Path("/usr/local"), Path("/"))]
    whole += [Path(sys.executable).resolve(), *(Path(p).absolute() for p in extra)]
    whole += [Path(p) for p in _SYSTEM]
    for folder in map(Path, path):
        if folder.is_file():
            whole.append(folder)
        elif not any(folder.is_relative_to(p) for p in whole):
            whole += _modules(folder)
    whole += _origin(entry)
    shown: list[Path] = []
    for candidate in sorted(set(whole), key=lambda p: (len(p.parts), p)):
        if candidate.exists() and not any(candidate.is_relative_to(p) for p in shown):
            shown.append(candidate)
    return shown


def command(
    entry: str,
    path: list[str],
    extra: Iterable[str],
    hidden: Iterable[str],
    argv: list[str],
    filter_fd: int | None,
) -> list[str]:
    """Return the command that runs `argv` in a sandbox which shows `readable(entry, path, extra)` without `hidden`.
    `filter_fd`: the filter for system calls (`judge.rewards.sandbox_filter`).

    `hidden` are folders (the run directory) that are shown empty even if they are within something readable.
    Call this only if `unavailable()` returns an empty string."""
    made = [*_namespaces(shutil.which("bwrap") or "bwrap"), *_DEVICES]
    if filter_fd is not None:
        made += ["--seccomp", str(filter_fd)]
    shown = readable(entry, path, extra)
    for place in shown:
        made += ["--ro-bind", str(place), str(place)]
    for merged in map(Path, _MERGED):
        if merged.is_symlink():
            made += ["--symlink", str(merged.readlink()), str(merged)]
        elif merged.is_dir():
            made += ["--ro-bind", str(merged), str(merged)]
    for folder in (Path(h).absolute() for h in hidden):
        for seen in {folder, folder.resolve()}:
            if seen.is_dir() and any(seen.is_relative_to(p) for p in shown):
                made += ["--tmpfs", str(seen), "--remount-ro", str(seen)]
    return [*made, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--", *argv]
