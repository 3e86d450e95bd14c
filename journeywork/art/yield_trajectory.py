"""Hand a trajectory over from inside a coroutine that returns something else."""

from __future__ import annotations

import contextvars
from collections.abc import Coroutine
from typing import Any

from journeywork.art.refused import refusing
from journeywork.art.trajectories import Trajectory

__getattr__ = refusing(__name__)
_yielded: contextvars.ContextVar[list[Trajectory] | None] = contextvars.ContextVar("yielded", default=None)


def yield_trajectory(trajectory: Trajectory) -> None:
    """Hand `trajectory` to the `capture_yielded_trajectory` that this code runs in. Without one, it is dropped."""
    found = _yielded.get()
    if found is not None:
        found[:] = [trajectory]


async def capture_yielded_trajectory(coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
    """Run a coroutine, and return the trajectory that it handed over last. Raises `RuntimeError` if it handed none
    over."""
    found: list[Trajectory] = []
    token = _yielded.set(found)
    try:
        await coroutine
    finally:
        _yielded.reset(token)
    if not found:
        raise RuntimeError("the coroutine did not call yield_trajectory")
    return found[0]
