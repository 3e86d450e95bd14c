"""Helpers of ART's programs that need nothing of a model.

They call a function again after errors (`retry`), and divide a data set into the batches of each step
(`iterate_dataset`). Names, arguments and orders are those of ART."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

log = logging.getLogger("journeywork.art")


def retry(
    max_attempts: int = 3,
    delay: float = 0.25,
    backoff_factor: float = 2.0,
    exceptions: tuple[type[Exception], ...] = (Exception,),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function or a coroutine function to be called again when it raises one of `exceptions`.

    It is called at most `max_attempts` times, with `delay` seconds before the second call, `backoff_factor` times as
    many before the third, and so on. A warning is logged before each repetition. The last exception is raised."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = getattr(function, "__name__", repr(function))

        def pause_after(error: Exception, attempt: int) -> float:
            """Return the seconds to wait before the next attempt. Raises the error after the last one."""
            if attempt == max_attempts:
                raise error
            log.warning("%s failed in attempt %d of %d: %r", name, attempt, max_attempts, error)
            return delay * backoff_factor ** (attempt - 1)

        @functools.wraps(function)
        def plain(*args: P.args, **kwargs: P.kwargs) -> R:
            for attempt in range(1, max_attempts + 1):
                try:
                    return function(*args, **kwargs)
                except exceptions as error:
                    time.sleep(pause_after(error, attempt))
            raise AssertionError("unreachable")

        @functools.wraps(function)
        async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
            for attempt in range(1, max_attempts + 1):
                try:
                    return await cast(Any, function)(*args, **kwargs)
                except exceptions as error:
                    await asyncio.sleep(pause_after(error, attempt))
            raise AssertionError("unreachable")

        return cast("Callable[P, R]", awaited) if inspect.iscoroutinefunction(function) else plain

    return decorate


@dataclass
class DatasetBatch(Generic[T]):
    """The items of one step."""

    items: list[T]
    step: int
    """Number of the step over all epochs, from 0."""
    epoch: int
    epoch_step: int
    """Number of the step in its epoch, from 0."""

    def __iter__(self) -> Iterator[Any]:
        """Items, epoch, step, step in the epoch: ART's batches were such tuples before 0.4."""
        return iter((self.items, self.epoch, self.step, self.epoch_step))


def iterate_dataset(
    dataset: Sequence[T], groups_per_step: int = 1, num_epochs: int = 1, initial_step: int = 0, use_tqdm: bool = True
) -> Iterator[DatasetBatch[T]]:
    """Yield the data set in batches of `groups_per_step`, shuffled anew in each epoch; the last one may be smaller.

    The order depends on the epoch and on the length only, so a program that begins at `initial_step` continues where
    another one ended. `use_tqdm` shows a progress bar on a terminal."""
    steps = -(-len(dataset) // groups_per_step)
    total = steps * num_epochs
    numbers: Iterator[int] = iter(range(initial_step, total))
    if use_tqdm and total:
        from tqdm.auto import tqdm

        numbers = iter(tqdm(numbers, initial=initial_step, total=total, desc="steps", disable=None))
    order, order_epoch = list[int](), -1
    for step in numbers:
        epoch, epoch_step = divmod(step, steps)
        if epoch != order_epoch:
            order, order_epoch = list(range(len(dataset))), epoch
            random.Random(epoch).shuffle(order)
        indices = order[epoch_step * groups_per_step : (epoch_step + 1) * groups_per_step]
        yield DatasetBatch([dataset[at] for at in indices], step, epoch, epoch_step)
