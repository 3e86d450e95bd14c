"""Models: prompted ones, and those that are trained, as programs of ART make and call them.

A *backend* (`journeywork.art.backend`) serves and trains a `TrainableModel`: `register` connects them. A model also has
a folder with its state and logs (`journeywork.art.records`)."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import pydantic
from openai import AsyncOpenAI

from journeywork.art import records
from journeywork.art.dev import InternalModelConfig
from journeywork.art.training import batches_of
from journeywork.art.trajectories import AnyGroup, Trajectory, TrajectoryGroup, as_groups
from journeywork.art.types import TrainConfig, TrainResult, TrainSFTConfig

log = logging.getLogger("journeywork.art")

ModelConfig = TypeVar("ModelConfig", bound="pydantic.BaseModel | None")

_TIMEOUT_S = 1200.0
"""A call may wait for an inference server that starts."""
_RETRIES = 8
"""Enough to survive a restart of the gateway."""


class Backend(Protocol):
    """What a model needs of a backend."""

    async def register(self, model: Any) -> None: ...

    async def get_step(self, model: Any) -> int: ...

    async def train(self, model: Any, trajectory_groups: Iterable[AnyGroup], **options: Any) -> TrainResult: ...

    async def train_sft(
        self, model: Any, batches: Sequence[Sequence[Mapping[str, Any]]], rates: Sequence[float]
    ) -> TrainResult: ...

    async def log_validation(self, model: Any, trajectory_groups: Iterable[TrajectoryGroup]) -> None: ...


class Model(pydantic.BaseModel, Generic[ModelConfig]):
    """A model that a rollout calls. This class is for prompted models, with an OpenAI-compatible URL and its key."""

    name: str
    project: str
    config: ModelConfig = None  # type: ignore[assignment]  # in a model without one, the type is None
    trainable: bool = False
    inference_api_key: str | None = None
    inference_base_url: str | None = None
    inference_model_name: str | None = None
    base_path: str = ".art"
    report_metrics: list[str] | None = None

    _backend: Backend | None = None
    _wandb_run: Any = None
    _measured: dict[str, records.StepMetrics] = pydantic.PrivateAttr(default_factory=dict)
    _began: float = pydantic.PrivateAttr(default_factory=time.monotonic)
    _clients: weakref.WeakKeyDictionary[Any, AsyncOpenAI] = pydantic.PrivateAttr(
        default_factory=weakref.WeakKeyDictionary
    )

    # -- inference -------------------------------------------------------------------------------------------------

    def openai_client(self) -> AsyncOpenAI:
        """Return an OpenAI client for the model. The calls of a trainable model are recorded.

        Raises `ValueError` if URL or key are not known."""
        if self.inference_base_url is None or self.inference_api_key is None:
            if self.trainable:
                raise ValueError(
                    f"model {self.name!r} has no inference server yet: call `await model.register(backend)` first"
                )
            raise ValueError(
                f"model {self.name!r} needs an `inference_base_url` and an `inference_api_key` for its OpenAI client"
            )
        try:
            loop: Any = asyncio.get_running_loop()  # connections belong to an event loop
        except RuntimeError:
            loop = Model  # a key for the client outside of any loop
        client, address = self._clients.get(loop), (self.inference_base_url.rstrip("/"), self.inference_api_key)
        if client is None:
            client = AsyncOpenAI(
                base_url=self.inference_base_url,
                api_key=self.inference_api_key,
                max_retries=_RETRIES,
                timeout=_TIMEOUT_S,
            )
        elif (str(client.base_url).rstrip("/"), client.api_key) != address:  # a step may change both
            client = client.with_options(base_url=self.inference_base_url, api_key=self.inference_api_key)
        self._clients[loop] = client
        return client

    async def close_client(self) -> None:
        """Close the client of `openai_client` in the running event loop. The next call of it makes a new one."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    def get_inference_name(self, step: int | None = None) -> str:
        """Return the name for `model` in requests: that of the version of `step`, or without a step the model's own,
        which a gateway routes to the newest version, or to the one that a promotion names."""
        name = self.inference_model_name or self.name
        return name if step is None else f"{name}@{step}"

    # -- state and logs --------------------------------------------------------------------------------------------

    @property
    def _folder(self) -> records.RunFolder:
        return records.RunFolder(Path(self.base_path) / self.project / "models" / self.name)

    def merge_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Merge a JSON object into the state that is kept with the model, at every depth. Returns the new state."""
        merged = records.merge(self.read_state() or {}, state)
        self._folder.write_state(merged)
        return merged

    def read_state(self) -> dict[str, Any] | None:
        """Return the kept state, or `None` if there is none."""
        return self._folder.read_state()

    async def log(
        self,
        trajectories: Iterable[Trajectory | BaseException | AnyGroup] | None = None,
        split: str = "val",
        *,
        metrics: dict[str, float] | None = None,
        step: int | None = None,
    ) -> None:
        """Append trajectories and metrics to the files of the model's folder.

        Rows of `history.jsonl` hold the means of rewards and metrics by `<split>/<name>`; names that begin with a
        section (`loss/`, `time/`, ...) or a split stay. They are also sent to Weights & Biases where the environment
        variable WANDB_API_KEY is set, unless `report_metrics` leaves out `wandb`.
        Captured trajectories of a trainable model are also recorded on the log as validation runs if `split` is `val`;
        `train` records those that it trains. The row also holds what `metrics_builder` measured."""
        at = step if step is not None else await self.get_step()
        row: dict[str, float] = dict(metrics or {})
        if trajectories is not None:
            items = list(trajectories)
            groups = records.in_groups(items)
            row = records.summary(groups) | (records.counts(groups, split) if split in records.SPLITS else {}) | row
            self._folder.write_trajectories(groups, split, at)
            if self.trainable and self._backend is not None and split == "val":
                await self._backend.log_validation(self, as_groups(items))
        row |= self.metrics_builder("eval" if split in ("val", "test") else split).take()
        if row:
            since = time.monotonic() - self._began
            row = records.with_sections(row, split) | {"training_step": at, "time/wall_clock_sec": since}
            self._folder.append_metrics(row, at)
            if self.report_metrics is None or "wandb" in self.report_metrics:
                await asyncio.to_thread(self._send_to_wandb, row)

    def metrics_builder(self, context: str = "train") -> records.StepMetrics:
        """Return what measures for the next row of `log`: `train` for the split `train`, `eval` for `val` and
        `test`."""
        return self._measured.setdefault(context, records.StepMetrics())

    def _get_wandb_run(self) -> Any:
        """Return the model's run at Weights & Biases, begun at first use; `None` without a key. Programs call it."""
        if self._wandb_run is None:
            self._wandb_run = records.open_wandb_run(self.project, self.name)
        return self._wandb_run

    def _send_to_wandb(self, row: dict[str, float]) -> None:
        """Send a row of metrics. An error of Weights & Biases is a warning: a step that was trained is not lost to
        it."""
        try:
            if (run := self._get_wandb_run()) is not None:
                run.log(row)
        except Exception as error:  # noqa: BLE001 - wandb's errors have no common class
            log.warning("the metrics of step %s are not at Weights & Biases: %s", row["training_step"], error)

    # -- backend ---------------------------------------------------------------------------------------------------

    def backend(self) -> Backend:
        """Return the backend that the model is registered with. Raises `ValueError` if there is none."""
        if self._backend is None:
            raise ValueError(f"model {self.name!r} has no backend: call `await model.register(backend)` first")
        return self._backend

    async def register(self, backend: Backend) -> None:
        """Connect the model with a backend."""
        self._backend = backend
        await backend.register(self)

    async def get_step(self) -> int:
        """Return the step of the newest version; 0 for a model that is not trainable."""
        return await self.backend().get_step(self) if self.trainable else 0


class TrainableModel(Model[ModelConfig], Generic[ModelConfig]):
    """A policy. `name` is the name of the model in the installation's settings."""

    base_model: str
    trainable: bool = True
    _internal_config: Any = None

    def __init__(
        self,
        *,
        name: str,
        project: str,
        base_model: str,
        config: ModelConfig | None = None,
        _internal_config: InternalModelConfig | None = None,
        **fields: Any,
    ) -> None:
        pydantic.BaseModel.__init__(self, name=name, project=project, base_model=base_model, config=config, **fields)
        self._internal_config = _internal_config

    async def train(
        self,
        trajectory_groups: Iterable[AnyGroup],
        config: TrainConfig | None = None,
        _config: dict[str, Any] | None = None,
        verbose: bool = False,
    ) -> None:
        """Log the groups and train one step on them. Returns once the new version is served.

        Fields of `config` that are not given are the installation's settings. Raises as `backend.train` does."""
        groups = as_groups(trajectory_groups)
        given = config.model_dump(exclude_unset=True) if config is not None else {}
        result = await self.backend().train(self, groups, verbose=verbose, **{**given, **(_config or {})})
        await self.log(groups, split="train", metrics=result.metrics, step=result.step)

    async def delete_checkpoints(self, best_checkpoint_metric: str = "val/reward") -> None:
        """Delete nothing: the trainer keeps the newest versions and the best by validation reward, and the lake every
        one."""

    async def train_sft(
        self, trajectories: Iterable[Trajectory], config: TrainSFTConfig | None = None, verbose: bool = False
    ) -> None:
        """Fine-tune the model on the assistant's messages of trajectories: one step, before, between or after steps of
        `train`, on the same adapter and optimizer.

        A `learning_rate` that is a list has that of each batch of `batch_size` conversations. Raises as
        `backend.train` does."""
        chats: list[dict[str, Any]] = []
        for trajectory in trajectories:
            further = ((history.messages(), history.tools) for history in trajectory.additional_histories)
            for messages, tools in ((trajectory.messages(), trajectory.tools), *further):
                chats.append({"messages": messages, **({"tools": tools} if tools else {})})
        settings = config or TrainSFTConfig()
        rates = settings.learning_rate if isinstance(settings.learning_rate, list) else [settings.learning_rate]
        await self.backend().train_sft(self, batches_of(chats, settings.batch_size), rates)
