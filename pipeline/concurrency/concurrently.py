"""Concurrent work over a list.

`concurrently` is a task group whose results come back in the order of the list, and whose first error is raised as it
is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

Item = TypeVar("Item")
Result = TypeVar("Result")


async def concurrently(
    work: Callable[[Item], Awaitable[Result]], items: Sequence[Item], limit: int | None = None
) -> list[Result]:
    """Return `await work(item)` of each item, in the order of `items`. At most `limit` of them run at once.

    Raises the first error of `work` as it is, not in an exception group; the other calls are cancelled then."""
    slots = anyio.CapacityLimiter(limit or max(len(items), 1))
    results: dict[int, Result] = {}
    errors: list[Exception] = []

    async def run(index: int, item: Item) -> None:
        async with slots:
            try:
                results[index] = await work(item)
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
                tg.cancel_scope.cancel()

    async with anyio.create_task_group() as tg:
        for index, item in enumerate(items):
            tg.start_soon(run, index, item)
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(items))]
