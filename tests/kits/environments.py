"""Virtual environments of the tests' own, for other people's packages that cannot share the services' environment.

Each is made from a lock in `requirements/` when it is first asked for, and made again when the lock changes. Git
ignores their folders.
"""

import fcntl
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
_INSTALL = ["-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps", "--no-compile"]
_INSTALL += ["--require-hashes", "--only-binary", ":all:", "-r"]


def environment(name: str) -> Path:
    """Return the folder of programs of the environment `.venv-<name>`, made from `requirements/<name>.txt`."""
    folder, lock = ROOT / f".venv-{name}", ROOT / "requirements" / f"{name}.txt"
    make = [sys.executable, "-m", "venv", "--clear", str(folder)]
    make_once(folder, lock, [make, [str(folder / "bin" / "python"), *_INSTALL, str(lock)]])
    return folder / "bin"


def packages(name: str) -> Path:
    """Return a folder for PYTHONPATH with the packages of `requirements/<name>.txt`, beside the services' own."""
    folder, lock = ROOT / "build" / name, ROOT / "requirements" / f"{name}.txt"
    make_once(folder, lock, [[sys.executable, *_INSTALL, str(lock), "--target", str(folder)]])
    return folder


def make_once(folder: Path, lock: Path, commands: Sequence[Sequence[str]]) -> None:
    """Run `commands`, which make `folder` from `lock`, unless they have been for this very lock."""
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    stamp = folder / ".made-from"
    guard_file = ROOT / "build" / f"{folder.name.lstrip('.')}.lock"
    guard_file.parent.mkdir(exist_ok=True)
    with guard_file.open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)  # two workers, or two test runs in one checkout
        if stamp.exists() and stamp.read_text() == digest:
            return
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if done.returncode:
                raise RuntimeError(f"{command[0]} failed:\n{done.stdout}{done.stderr}")
        stamp.write_text(digest)
