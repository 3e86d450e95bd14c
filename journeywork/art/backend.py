"""A running installation as ART's backend, by the URL of its gateway.

`Model` and `TrainableModel` (`journeywork.art.model`) call it. The model's calls are recorded in a trajectory of their
own (`_open_calls`), which is never trained: `train` has the gateway make the trajectories of a step of the calls that
their choices name (`journeywork.art.training`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from journeywork.art.dev import step_settings
from journeywork.art.errors import UnsupportedError
from journeywork.art.gateway import Gateway
from journeywork.art.model import Model, TrainableModel
from journeywork.art.records import step_metrics
from journeywork.art.training import record_groups, train_chats, train_groups
from journeywork.art.trajectories import AnyGroup, TrajectoryGroup, as_groups
from journeywork.art.types import TrainResult


class RemoteBackend:
    """The installation whose gateway is at `url` (default: $JOURNEYWORK_URL). `api_key` is a key of role `agent` if the
    gateway has keys (default: $JOURNEYWORK_API_KEY); steps with a learning rate or a loss of their own need one of
    role `operator`."""

    def __init__(self, url: str | None = None, *, api_key: str | None = None) -> None:
        self._url = url or os.environ.get("JOURNEYWORK_URL", "")
        self._api_key = api_key if api_key is not None else os.environ.get("JOURNEYWORK_API_KEY", "")
        self._models: list[TrainableModel[Any]] = []

    async def url_of(self, model: Model[Any]) -> str:
        """Return the URL of the gateway that serves a model; empty if none is known."""
        return self._url

    async def _gateway(self, model: Model[Any]) -> Gateway:
        """Return a client of the gateway that serves a model. The caller closes it. Raises `ValueError` if no URL is
        known."""
        return Gateway(await self.url_of(model), api_key=self._api_key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the clients of the registered models. The installation keeps running."""
        for model in self._models:
            await model.close_client()

    async def register(self, model: Model[Any]) -> None:
        """Connect a model. The calls of a trainable model are recorded from now on.

        Raises `LookupError` if the installation does not serve a model of that name."""
        if not isinstance(model, TrainableModel):
            return
        if not any(known is model for known in self._models):
            self._models.append(model)
        model.inference_model_name = model.name
        async with await self._gateway(model) as gateway:
            await gateway.policy(model.name)
            await self._open_calls(gateway, model)

    async def _open_calls(self, gateway: Gateway, model: TrainableModel[Any]) -> None:
        """Open the trajectory that records the model's next calls.

        Each step gets a new one, so that none grows without bound. Clients that still use the one before continue to
        be recorded."""
        # They are validation runs, which are never trained: what is trained are the runs made of them.
        calls = await gateway.open(
            model.name, split="val", references=True, metadata={"art": "calls", "project": model.project}
        )
        model.inference_base_url, model.inference_api_key = calls.base_url, calls.api_key

    async def get_step(self, model: Model[Any]) -> int:
        """Return the step of the newest version of a model."""
        async with await self._gateway(model) as gateway:
            newest = str((await gateway.policy(model.name))["newest"])
        return int(newest.rpartition("@")[2])

    async def train(
        self,
        model: TrainableModel[Any],
        trajectory_groups: Iterable[AnyGroup],
        *,
        learning_rate: float | None = None,
        **options: Any,
    ) -> TrainResult:
        """Train one step on the groups, and return once the new version is served.

        `learning_rate` and `options` (`loss_fn`, `kl_penalty_coef`) hold for this step: one of the loss chooses ART's
        whole loss. What is not given is the installation's. Raises `UnsupportedError`, `NotCapturedError` and
        `TrainingError`, also for a setting that the installation does not let a step choose."""
        settings = step_settings(learning_rate, options)
        groups = as_groups(trajectory_groups)
        async with await self._gateway(model) as gateway:
            result = await train_groups(gateway, model.name, groups, settings)
            await self._open_calls(gateway, model)
        result.metrics = step_metrics(result.metrics, groups)
        return result

    async def log_validation(self, model: TrainableModel[Any], trajectory_groups: Iterable[TrajectoryGroup]) -> None:
        """Record groups as validation runs, which count for the best checkpoint."""
        async with await self._gateway(model) as gateway:
            await record_groups(gateway, model.name, trajectory_groups)

    async def train_sft(
        self, model: TrainableModel[Any], batches: Sequence[Sequence[Mapping[str, Any]]], rates: Sequence[float]
    ) -> TrainResult:
        """Take one step of supervised fine-tuning, of an update per batch of conversations. See `train_chats`."""
        async with await self._gateway(model) as gateway:
            result = await train_chats(gateway, model.name, batches, rates)
            await self._open_calls(gateway, model)
        return result

    async def _experimental_push_to_s3(
        self, model: Model[Any], *, s3_bucket: str | None = None, **options: Any
    ) -> None:
        """Copy nothing: `store.dir` of the installation may be a bucket. Raises `UnsupportedError` if one is named,
        here or by the environment variable BACKUP_BUCKET."""
        if bucket := s3_bucket or os.environ.get("BACKUP_BUCKET"):
            raise UnsupportedError(
                f"nothing is copied to or from {bucket}: set store.dir of the installation to s3://{bucket}, and begin "
                "elsewhere with models.0.start (docs/training.md)"
            )

    _experimental_pull_from_s3 = _experimental_push_to_s3


class ServerlessBackend(RemoteBackend):
    """`RemoteBackend` with the arguments of ART's class: `base_url` is the gateway's URL ($JOURNEYWORK_URL)."""

    def __init__(self, *, api_key: str | None = None, base_url: str | None = None) -> None:
        super().__init__(base_url, api_key=api_key)
