"""A terminal for tests: tmux, driven by its commands."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed: apt-get install tmux")


class Terminal:
    """One terminal of a size in which one command runs. Use it in a `with` block."""

    def __init__(self, folder: Path, width: int, height: int, command: Sequence[str]) -> None:
        self._base = ["tmux", "-u", "-f", "/dev/null", "-S", str(folder / "tmux")]
        # The shell stays after the command, so that the screen that it leaves can be seen.
        line = f"trap : INT; {shlex.join(command)}; echo ended with $?; exec sleep 600"
        # COLUMNS and LINES, which an imported library may have set, would say the size instead of the terminal.
        others = ("TMUX", "TMUX_PANE", "COLUMNS", "LINES")
        env = {name: value for name, value in os.environ.items() if name not in others}
        env |= {"TERM": "xterm-256color", "LANG": "C.UTF-8"}
        size = ["-x", str(width), "-y", str(height)]
        started = [*self._base, "new-session", "-d", *size, "-c", str(Path.cwd()), "sh", "-c", line]
        subprocess.run(started, check=True, env=env)

    def screen(self) -> list[str]:
        """The lines of the screen."""
        shown = subprocess.run([*self._base, "capture-pane", "-p"], check=True, capture_output=True, text=True)
        return shown.stdout.splitlines()

    def until(self, holds: Callable[[str], bool], timeout_s: float = 90.0) -> list[str]:
        """The lines of the screen, once `holds` is true of their text."""
        deadline = time.monotonic() + timeout_s
        while not holds("\n".join(shown := self.screen())):
            assert time.monotonic() < deadline, "\n".join(shown)
            time.sleep(0.05)
        return shown

    def keys(self, *names: str) -> None:
        """Press keys, by tmux's names."""
        subprocess.run([*self._base, "send-keys", *names], check=True)

    def resize(self, width: int, height: int) -> None:
        """Give the terminal another size."""
        subprocess.run([*self._base, "resize-window", "-x", str(width), "-y", str(height)], check=True)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run([*self._base, "kill-server"], check=False, capture_output=True)
