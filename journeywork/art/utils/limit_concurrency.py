"""Limit how many calls of a coroutine function run at the same time."""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def limit_concurrency(
    n: int, derive_key: Callable[..., str] | None = None
) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
    """Decorate a coroutine function so that at most `n` of its calls run at the same time: of all calls, or of those
    for which `derive_key`, called with the same arguments, returns the same."""

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        slots: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(n))

        @functools.wraps(function)
        async def limited(*args: P.args, **kwargs: P.kwargs) -> R:
            async with slots[derive_key(*args, **kwargs) if derive_key is not None else ""]:
                return await function(*args, **kwargs)

        return limited

    return decorate
