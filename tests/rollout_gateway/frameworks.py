"""Programs of other people that the tests run: in a virtual environment of their own, made when first asked for.

They want other versions of libraries than the services do, so they can't share the services' environment. Both folders
are ignored by git and made again when their locks change: `.venv-compat` and `agents/node/node_modules`.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_LOCK = _ROOT / "requirements" / "compat.txt"
_VENV = _ROOT / ".venv-compat"
_NODE = Path(__file__).parent / "agents" / "node"

AGENTS = Path(__file__).parent / "agents"


def compat_bin() -> Path:
    """The folder with `python`, `node` and `schemathesis`. The first call on a machine takes up to a minute."""
    _once(_VENV, _LOCK, [
        [sys.executable, "-m", "venv", "--clear", str(_VENV)],
        [str(_VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps",
         "--no-compile", "--require-hashes", "--only-binary", ":all:", "-r", str(_LOCK)],
    ])  # fmt: skip
    return _VENV / "bin"


def node() -> Path:
    """The Node program, with the packages of `agents/node` beside its script."""
    bin_folder = compat_bin()
    options = ("--silent", "--no-audit", "--no-fund", "--ignore-scripts")
    npm = [str(bin_folder / "npm"), "ci", *options, "--prefix", str(_NODE)]
    _once(_NODE / "node_modules", _NODE / "package-lock.json", [npm])
    return bin_folder / "node"


def package(path: str) -> Path:
    """A file of a Node package, installed."""
    node()
    return _NODE / "node_modules" / path


def _once(folder: Path, lock: Path, commands: Sequence[Sequence[str]]) -> None:
    """Run `commands`, which make `folder` from `lock`, unless they have been for this very lock."""
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    stamp = folder / ".made-from"
    guard_file = _ROOT / "build" / "compat.lock"
    guard_file.parent.mkdir(exist_ok=True)
    with guard_file.open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)  # two test runs in one checkout
        if stamp.exists() and stamp.read_text() == digest:
            return
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if done.returncode:
                raise RuntimeError(f"{command[0]} failed:\n{done.stdout}{done.stderr}")
        stamp.write_text(digest)
