"""What `journeywork up` shows on its terminal: a line for each change, and once all is ready the live view.

The view is a process of its own (`store.showing.watch`), so that what draws cannot disturb what runs, and the backbone
imports no service. While it has the screen, nothing else is printed. Without a terminal there are lines only.
"""

from __future__ import annotations

import subprocess
import sys

import anyio
from rich.console import Console

_VIEW = "store.showing.watch"
_END_S = 5.0
"""The view gets this long to give the screen back."""


class Terminal:
    """The terminal of one `journeywork up`."""

    def __init__(self, console: Console, run_dir: str, *, view: bool) -> None:
        """`view`: whether `show` shows the live view, if there is a terminal."""
        self._console, self._run_dir = console, run_dir
        self._wanted = view and sys.stdout.isatty() and not console.is_dumb_terminal
        self._scope: anyio.CancelScope | None = None
        self._ended = anyio.Event()

    def say(self, text: str) -> None:
        """Print a line, unless the view has the screen."""
        if self._scope is None:
            self._console.print(text)

    async def show(self) -> None:
        """Show the live view until `close`. Returns at once where none is wanted."""
        if not self._wanted:
            return
        command = [sys.executable, "-m", _VIEW, "--child", "--run-dir", self._run_dir]
        with anyio.CancelScope() as self._scope:
            process = await anyio.open_process(command, stdin=subprocess.DEVNULL, stdout=None, stderr=None)
            try:
                await process.wait()
            finally:
                with anyio.CancelScope(shield=True):
                    if process.returncode is None:
                        process.terminate()
                        with anyio.move_on_after(_END_S):
                            await process.wait()
                    if process.returncode is None:
                        process.kill()
                        await process.wait()
        closed, self._scope = self._scope.cancel_called, None
        self._ended.set()
        if not closed and process.returncode:
            self.say(f"the view ended with code {process.returncode}; `journeywork watch` shows it again")

    async def close(self) -> None:
        """End the view; returns when the screen is free."""
        if self._scope is not None:
            self._scope.cancel()
            await self._ended.wait()
