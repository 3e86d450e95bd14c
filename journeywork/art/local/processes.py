"""Installations as processes of this machine: how one is started, what it says of itself, how it is stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

_STOP_S = 120.0
"""How long an installation may take to stop."""
_LOG_BYTES = 2000
"""Bytes of the standard error and of the supervisor's log in an error message."""
_READ_S = 30.0
"""How long the rest of an ended installation's standard error may take to read."""


class UpError(Exception):
    """`journeywork up` ended before the installation was ready. The message holds the end of its standard error
    and of its log."""


class Installation(subprocess.Popen[bytes]):
    """A process of `journeywork up`. Its standard error is shown on the program's, and its end is kept."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            bufsize=0,  # a buffer that a thread reads when the program ends is a fatal error of Python
            start_new_session=True,  # Ctrl-C reaches the program, which then stops the installation
        )
        self._end = b""
        self._reader = Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def _pass_on(self) -> None:
        """Copy the process's standard error to the program's, and keep its end. Runs in a thread until it is closed."""
        assert self.stderr is not None
        with self.stderr as pipe:
            while chunk := pipe.read(_LOG_BYTES):
                self._end = (self._end + chunk)[-_LOG_BYTES:]
                with suppress(OSError):  # the program's is closed
                    os.write(2, chunk)

    def end_of_errors(self) -> str:
        """Return the end of what the process, which has ended, wrote on standard error. Blocks until it is read."""
        self._reader.join(_READ_S)
        return self._end.decode("utf-8", "replace").strip()


def program_of_up() -> str:
    """Return the command `journeywork`. Raises `UpError` if it is not installed."""
    beside = Path(sys.executable).with_name("journeywork")
    program = str(beside) if beside.exists() else shutil.which("journeywork")
    if program is None:
        raise UpError(
            "the command `journeywork` is not installed here: install the extra `cpu` or `gpu`, or set "
            "JOURNEYWORK_URL to the gateway of an installation that runs elsewhere"
        )
    return program


def stop_installations(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Stop installations. Blocks until they have stopped."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def state_of(run_dir: Path) -> dict[str, Any]:
    """Return what the installation in a run directory says of itself; empty if there is none."""
    try:
        return dict(json.loads((run_dir / "state.json").read_text("utf-8")))
    except FileNotFoundError:
        return {}


def cause_of_end(process: Installation, run_dir: Path, since: float) -> str:
    """Return the end of the standard error of an installation that has ended, and of its supervisor's log if that was
    written after `since` (seconds since the epoch). Blocks until they are read."""
    errors, file = process.end_of_errors(), run_dir / "logs" / "supervisor.log"
    parts = [f"its standard error ends with:\n{errors}"] if errors else []
    if file.exists() and file.stat().st_mtime >= since:
        text = file.read_bytes()[-_LOG_BYTES:].decode("utf-8", "replace")
        parts.append(f"the end of {file} is:\n{text}")
    return "\n".join(parts) or "it wrote no log and nothing on standard error"


def flags(settings: dict[str, Any]) -> list[str]:
    """Return settings as arguments of `journeywork up`."""
    return [part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")]
