"""Waiting for what another service does."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

Found = TypeVar("Found")


async def until(probe: Callable[[], Awaitable[Found]], seconds: float = 100) -> Found:
    """Return what `probe` returns once it is true. The test fails after so many seconds."""
    with anyio.fail_after(seconds):
        while not (found := await probe()):
            await anyio.sleep(0.02)  # a server or a process can only be asked
    return found


async def until_true(condition: Callable[[], object], seconds: float = 100) -> None:
    """As `until`, for what can be asked at once."""

    async def probe() -> object:
        return condition()

    await until(probe, seconds)
