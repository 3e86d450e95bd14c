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
    yielded = _yielded.get()
    if yielded is not None:
        yielded[:] = [trajectory]


async def capture_yielded_trajectory(coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
    """Run a coroutine, and return the trajectory that it handed over last. Raises `RuntimeError` if it handed none
    over."""
    yielded: list[Trajectory] = []
    token = _yielded.set(yielded)
    try:
        await coroutine
    finally:
        _yielded.reset(token)
    if not yielded:
        raise RuntimeError("the coroutine did not call yield_trajectory")
    return yielded[0]
