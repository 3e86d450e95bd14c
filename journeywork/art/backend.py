"""What a model needs of a backend."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from journeywork.art.errors import UnsupportedError as UnsupportedError
from journeywork.art.trajectories import AnyGroup, TrajectoryGroup
from journeywork.art.types import TrainResult


class AnyModel(Protocol):
    """What a backend needs of a model."""

    name: str
    project: str
    trainable: bool
    base_path: str
    inference_base_url: str | None
    inference_api_key: str | None


class AnyTrainableModel(AnyModel, Protocol):
    """What a backend needs of a trainable model."""

    base_model: str

    async def close_client(self) -> None:
        """Close the client of the running event loop."""


class Backend(Protocol):
    """Serves and trains models."""

    async def close(self) -> None:
        """Release what the backend holds."""

    async def register(self, model: AnyModel) -> None:
        """Connect a model. Sets its `inference_base_url` and `inference_api_key`."""

    async def train(
        self, model: AnyTrainableModel, trajectory_groups: Iterable[AnyGroup], **kwargs: Any
    ) -> TrainResult:
        """Train one step on the groups, and return once the new version is served."""

    async def get_step(self, model: AnyTrainableModel) -> int:
        """Return the step of the newest version of a model."""

    async def log_validation(
        self, model: AnyTrainableModel, trajectory_groups: Iterable[TrajectoryGroup], split: str
    ) -> None:
        """Record groups that are not trained."""
