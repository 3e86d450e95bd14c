"""Pauses between the attempts at something that fails for a while.

Each pause is about twice as long as the one before, up to a limit. A part of it is random, so that processes that
failed at the same moment do not all ask again at the same moment."""

from __future__ import annotations

import random

import anyio


class Backoff:
    """Pauses that double up to a limit, each with a random part so that many callers do not ask at the same moment."""

    def __init__(self, first_s: float = 0.01, longest_s: float = 0.5) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._next_s = first_s

    def next_s(self) -> float:
        """Return the length of the next pause in seconds: half to all of the present limit, which then doubles."""
        seconds = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, self._longest_s)
        return seconds

    async def wait(self) -> None:
        """Sleep for the next pause."""
        await anyio.sleep(self.next_s())

    def reset(self) -> None:
        """Begin with the shortest pause again, after a success."""
        self._next_s = self._first_s
