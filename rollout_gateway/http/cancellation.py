"""Early end of the work for one request: the client has gone, or the gateway stops.

An `anyio.CancelScope` would do the same. Entering and leaving one takes 2.9 microseconds, and a captured call has
about 230 in all."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Cancellation:
    """A block of work that `cancel` ends from outside.

    Enter it around work that is pointless once nobody waits for the answer. Leave it before work that must be
    completed, such as recording the call. It can be entered again afterwards. One task may be in it at a time."""

    __slots__ = ("_task", "error")

    def __init__(self) -> None:
        self.error: Exception | None = None
        """The error that `cancel` was first called with."""
        self._task: asyncio.Task[object] | None = None

    def cancel(self, error: Exception) -> None:
        """End the block: what it awaits is cancelled, and the block raises `error`. A block that is entered later
        raises it at once."""
        if self.error is None:
            self.error = error
            if self._task is not None:
                self._task.cancel()

    def __enter__(self) -> None:
        if self.error is not None:
            raise self.error
        self._task = asyncio.current_task()

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self.error is None or task is None:
            return
        # If something else cancelled the task too, it stays cancelled, as in `asyncio.timeout`.
        if task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise self.error from raised
