"""Play many trajectories or groups concurrently.

A group that is awaited plays its own trajectories (`journeywork.art.trajectories.PendingGroup`). Exceptions are counted
in the call's `GatherContext` (`journeywork.art.progress`): one more than allowed is raised, and ends what still
plays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from journeywork.art.progress import GatherContext, gathering, get_gather_context, set_gather_context
from journeywork.art.trajectories import PendingGroup, Trajectory, TrajectoryGroup, cancel_all

__all__ = [
    "GatherContext",
    "gather_trajectories",
    "gather_trajectory_groups",
    "set_gather_context",
    "wrap_group_awaitable",
]
AfterEach = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup | list[TrajectoryGroup] | None]]
"""What is done with each group that was played; it returns the group, several in its place, or `None` to drop it."""


async def gather_trajectory_groups(
    groups: Iterable[Awaitable[TrajectoryGroup]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: int | float = 0,
    after_each: AfterEach | None = None,
) -> list[TrajectoryGroup]:
    """Play groups concurrently. Returns them in their order.

    `max_exceptions` is the number of exceptions that may be kept in the groups, or their share of all trajectories
    (below 1). One more is raised, and what is still played is cancelled. `after_each` is called with each group; it
    returns the group, several groups, or `None` to leave the group out. `pbar_desc` is the label of the progress bar,
    which is shown on a terminal; `None` shows none. `pbar_total_completion_tokens` has no effect, as in ART."""
    waiting = list(groups)
    total = sum(group.size if isinstance(group, PendingGroup) else 1 for group in waiting)

    async def play(group: Awaitable[TrajectoryGroup]) -> list[TrajectoryGroup]:
        played = await wrap_group_awaitable(group)
        if played is None or after_each is None:
            return [played] if played is not None else []
        after = await after_each(played)
        if after is None:
            return []
        return after if isinstance(after, list) else [after]

    with gathering(total, pbar_desc, max_exceptions):
        lists = await _gather_all([play(group) for group in waiting])
    return [group for played in lists for group in played]


async def wrap_group_awaitable(awaitable: Awaitable[Any]) -> Any:
    """Await a group, or any sequence of trajectories, count it in the current context, and return it. Return `None`
    instead of an exception that the context allows."""
    context = get_gather_context()
    if isinstance(awaitable, PendingGroup):
        return await awaitable  # it counts its trajectories itself
    try:
        group = await awaitable
    except Exception:
        if not context.allow():
            raise
        return None
    context.count(*group, n=len(group))
    return group


async def _gather_all(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run coroutines concurrently, and return their results in order. Raises the first exception, after the others were
    cancelled and have ended."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def gather_trajectories(
    trajectories: Iterable[Awaitable[Any]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: int | float = 0,
) -> list[Any]:
    """Play trajectories concurrently. Returns them in their order; an awaitable may also give several.

    Exceptions are returned in place of the trajectories, as far as `max_exceptions` allows (as in
    `gather_trajectory_groups`); one more is raised."""
    waiting = list(trajectories)

    async def play(awaitable: Awaitable[Any], context: GatherContext) -> Any:
        try:
            played = await awaitable
        except Exception as error:
            if not context.allow():
                raise
            return error
        context.count(*([played] if isinstance(played, Trajectory) else played))
        return played

    with gathering(len(waiting), pbar_desc, max_exceptions) as context:
        return await _gather_all([play(item, context) for item in waiting])
