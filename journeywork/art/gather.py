"""Play many trajectories or groups concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Literal, overload

from journeywork.art.gathering import Gathering, as_current
from journeywork.art.refused import refusing
from journeywork.art.trajectories import PendingGroup, Trajectory, TrajectoryGroup, cancel_all

__getattr__ = refusing(__name__)
AfterEach = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup | list[TrajectoryGroup] | None]]


async def gather_trajectory_groups(
    groups: Iterable[Awaitable[TrajectoryGroup]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: int | float = 0,
    max_metrics: int | None = None,
    after_each: AfterEach | None = None,
) -> list[TrajectoryGroup]:
    """Play groups concurrently. Returns them in their order.

    `max_exceptions` is the number of exceptions that may be kept in the groups, or their share of all trajectories
    (below 1). One more is raised, and what is still played is cancelled. `after_each` is called with each group; it
    returns the group, several groups, or `None` to leave the group out. `pbar_desc` is the label of the progress bar,
    which is shown on a terminal; `None` shows none."""
    waiting = list(groups)
    total = sum(group.size if isinstance(group, PendingGroup) else 1 for group in waiting)
    gathering = Gathering(
        total,
        pbar_desc,
        max_exceptions=max_exceptions,
        max_metrics=max_metrics,
        tokens=pbar_total_completion_tokens,
    )

    async def play(group: Awaitable[TrajectoryGroup]) -> list[TrajectoryGroup]:
        try:
            played = await group
        except Exception as error:
            if isinstance(group, PendingGroup) or not gathering.allow(error):
                raise
            return []
        if after_each is None:
            return [played]
        after = await after_each(played)
        if after is None:
            return []
        return after if isinstance(after, list) else [after]

    with as_current(gathering):
        tasks = [asyncio.ensure_future(play(group)) for group in waiting]
        try:
            lists = await asyncio.gather(*tasks)
        finally:
            await cancel_all(tasks)
    return [group for played in lists for group in played]


@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[Trajectory]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: Literal[0] = 0,
) -> list[Trajectory]: ...


@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[Trajectory]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: int | float,
) -> list[Trajectory | BaseException]: ...


@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[Iterable[Trajectory]]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: Literal[0] = 0,
) -> list[list[Trajectory]]: ...


@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[Iterable[Trajectory]]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: int | float,
) -> list[list[Trajectory] | BaseException]: ...


async def gather_trajectories(
    trajectories: Iterable[Awaitable[Any]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: int | float = 0,
) -> Any:
    """Play trajectories concurrently. Returns them in their order; an awaitable may also give several.

    Exceptions are returned in place of the trajectories, as far as `max_exceptions` allows (as in
    `gather_trajectory_groups`); one more is raised."""
    waiting = list(trajectories)
    gathering = Gathering(
        len(waiting),
        pbar_desc,
        max_exceptions=max_exceptions,
        max_metrics=None,
        tokens=pbar_total_completion_tokens,
    )

    async def play(item: Awaitable[Any]) -> Trajectory | list[Trajectory] | BaseException:
        try:
            played = await item
        except Exception as error:
            if not gathering.allow(error):
                raise
            return error
        if not isinstance(played, Trajectory):
            played = list(played)
            for trajectory in played:
                gathering.add_metrics(trajectory)
            gathering.advance()
            return played
        gathering.count(played)
        return played

    with as_current(gathering):
        tasks = [asyncio.ensure_future(play(item)) for item in waiting]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await cancel_all(tasks)
