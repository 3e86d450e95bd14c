"""What an environment offers: tasks, and one attempt at a task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from journeywork.trajectory import Trajectory


class ScenarioError(Exception):
    """The environment cannot be used. The message says why and what to do."""


@dataclass(frozen=True)
class Scenario:
    """One task of an environment."""

    id: str
    description: str = ""
    """What a judge reads about the task."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The environment's own data."""


class Scenarios(Protocol):
    """An environment, ready to be played."""

    def tasks(self, held_out: bool, limit: int) -> list[Scenario]:
        """Return the first `limit` tasks, of the held-out ones or of those for training."""

    async def play(self, run: Trajectory, task: Scenario) -> float | None:
        """Play one attempt. Sets metrics, and returns the reward; `None` leaves it to the judge."""


def numbers(found: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the finite numbers among an environment's metrics."""
    return {
        str(name): float(value)
        for name, value in (found or {}).items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
