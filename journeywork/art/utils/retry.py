"""Repeat a function that failed."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("journeywork.art")


def retry(
    max_attempts: int = 3,
    delay: float = 0.25,
    backoff_factor: float = 2.0,
    exceptions: tuple[type[Exception], ...] = (Exception,),
    on_retry: Callable[[Exception, int], None] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function or a coroutine function to be called again when it raises one of `exceptions`.

    It is called at most `max_attempts` times, with `delay` seconds before the second call, `backoff_factor` times as
    many before the third, and so on. `on_retry` is called with the exception and the number of the failed call before
    each repetition; without it, a warning is logged. The last exception is raised."""

    def pauses() -> Iterator[tuple[int, float]]:
        for attempt in range(1, max_attempts):
            yield attempt, delay * backoff_factor ** (attempt - 1)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        def tell(error: Exception, attempt: int) -> None:
            if on_retry is not None:
                on_retry(error, attempt)
            else:
                name = getattr(function, "__name__", repr(function))
                log.warning("%s failed in attempt %d of %d: %r", name, attempt, max_attempts, error)

        @functools.wraps(function)
        def plain(*args: P.args, **kwargs: P.kwargs) -> R:
            for attempt, pause in pauses():
                try:
                    return function(*args, **kwargs)
                except exceptions as error:
                    tell(error, attempt)
                time.sleep(pause)
            return function(*args, **kwargs)

        @functools.wraps(function)
        async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
            for attempt, pause in pauses():
                try:
                    return await cast(Any, function)(*args, **kwargs)
                except exceptions as error:
                    tell(error, attempt)
                await asyncio.sleep(pause)
            return await cast(Any, function)(*args, **kwargs)

        return cast("Callable[P, R]", awaited) if inspect.iscoroutinefunction(function) else plain

    return decorate
