"""Batches of groups, of which some are played ahead."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterable
from itertools import islice

from journeywork.art.gather import gather_trajectory_groups
from journeywork.art.trajectories import TrajectoryGroup, cancel_all


async def trajectory_group_batches(
    groups: Iterable[Awaitable[TrajectoryGroup]],
    *,
    batch_size: int,
    max_batch_exceptions: int | float = 0,
    max_concurrent_batches: int = 4,
    skip_batches: int = 0,
    pbar_desc: str | None = "batches",
    pbar_total_completion_tokens: bool = False,
) -> AsyncIterator[list[TrajectoryGroup]]:
    """Yield batches of `batch_size` groups, in their order. The last one may be smaller.

    Up to `max_concurrent_batches` are played at a time. `skip_batches` are left out at the beginning: their groups are
    not played. `max_batch_exceptions` is `max_exceptions` of each batch."""
    if batch_size < 1 or max_concurrent_batches < 1:
        raise ValueError("batch_size and max_concurrent_batches must be at least 1")
    rest = iter(groups)
    for skipped in islice(rest, skip_batches * batch_size):
        if asyncio.iscoroutine(skipped):
            skipped.close()  # so that Python does not warn of a coroutine that was never awaited
    running: deque[asyncio.Task[list[TrajectoryGroup]]] = deque()

    def start() -> None:
        batch = list(islice(rest, batch_size))
        if batch:
            running.append(
                asyncio.ensure_future(
                    gather_trajectory_groups(
                        batch,
                        pbar_desc=pbar_desc,
                        pbar_total_completion_tokens=pbar_total_completion_tokens,
                        max_exceptions=max_batch_exceptions,
                    )
                )
            )

    try:
        for _ in range(max_concurrent_batches):
            start()
        while running:
            batch = await running[0]
            running.popleft()
            start()
            yield batch
    finally:
        await cancel_all(running)
