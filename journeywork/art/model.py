"""Models: prompted ones, and those that are trained."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Iterable
from contextvars import Token
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypedDict, cast

import pydantic
from openai import AsyncOpenAI
from typing_extensions import TypeVar, Unpack

from journeywork.art.backend import Backend
from journeywork.art.metrics import MetricsBuilder
from journeywork.art.records import (
    SPLITS,
    RunFolder,
    counts,
    in_groups,
    merge,
    scenario_ids,
    summary,
    with_sections,
)
from journeywork.art.refused import METHODS, refuse_method, refusing
from journeywork.art.supervised import batches_of
from journeywork.art.tracking import WandbRun
from journeywork.art.trajectories import AnyGroup, Trajectory, as_groups
from journeywork.art.types import TrainConfig, TrainSFTConfig

if TYPE_CHECKING:
    from journeywork.art.dev import InternalModelConfig
    from journeywork.art.dev import TrainSFTConfig as DevTrainSFTConfig

__getattr__ = refusing(__name__)
log = logging.getLogger("journeywork.art")

ModelConfig = TypeVar("ModelConfig", bound="pydantic.BaseModel | None")
StateType = TypeVar("StateType", bound="dict[str, Any]", default="dict[str, Any]")

METRICS_BUILDER_STATE_KEY = "_metrics_builder_state"
"""Key of the sums over all steps in a model's state."""
_TIMEOUT_S = 1200.0
"""A call may wait for an inference server that starts."""
_RETRIES = 8
"""Enough to survive a restart of the gateway."""


class ModelFields(TypedDict, total=False):
    """Further fields of a model."""

    entity: str | None
    id: str | None
    run_id: str | None
    inference_api_key: str | None
    inference_base_url: str | None
    inference_model_name: str | None
    base_path: str
    report_metrics: list[str] | None


class Model(pydantic.BaseModel, Generic[ModelConfig, StateType]):
    """A model that a rollout calls. This class is for prompted models, with an OpenAI-compatible URL and its key."""

    name: str
    project: str
    entity: str | None = None
    id: str | None = None
    run_id: str | None = None
    config: ModelConfig
    trainable: bool = False
    inference_api_key: str | None = None
    inference_base_url: str | None = None
    inference_model_name: str | None = None
    base_path: str = ".art"
    report_metrics: list[str] | None = None

    _backend: Any = None
    _wandb: WandbRun | None = None
    _wandb_run: Any = None
    """ART's slot of the run at Weights & Biases: programs put one of their own here."""
    _builder: MetricsBuilder | None = None
    _began: float = pydantic.PrivateAttr(default_factory=time.monotonic)
    _rowed: tuple[int, float] = pydantic.PrivateAttr(default_factory=lambda: (-1, time.monotonic()))
    """The last step with a row of the split `train`, and when the first of its rows was written."""
    _clients: weakref.WeakKeyDictionary[Any, AsyncOpenAI] = pydantic.PrivateAttr(
        default_factory=weakref.WeakKeyDictionary
    )

    def __init__(
        self, *, name: str, project: str, config: ModelConfig | None = None, **fields: Unpack[ModelFields]
    ) -> None:
        super().__init__(name=name, project=project, config=config, **fields)

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            refuse_method(self, name)
        return super().__getattr__(name)  # type: ignore[misc]  # pydantic's, which type checkers don't see

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
            loop = Model
        client = self._clients.get(loop)
        if client is None or (str(client.base_url).rstrip("/"), client.api_key) != self._address():
            if client is not None:  # with the same connections
                client = client.with_options(base_url=self.inference_base_url, api_key=self.inference_api_key)
            else:
                client = AsyncOpenAI(
                    base_url=self.inference_base_url, api_key=self.inference_api_key, max_retries=_RETRIES,
                    timeout=_TIMEOUT_S,
                )  # fmt: skip
            self._clients[loop] = client
        return client

    async def close_client(self) -> None:
        """Close the client of `openai_client` in the running event loop. The next call of it makes a new one."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    def _address(self) -> tuple[str, str | None]:
        return (self.inference_base_url or "").rstrip("/"), self.inference_api_key

    def get_inference_name(self, step: int | None = None) -> str:
        """Return the name for `model` in requests: that of the version of `step`, or without a step the model's own,
        which a gateway routes to the newest version, or to the one that a promotion names."""
        name = self.inference_model_name or self.name
        return name if step is None else f"{name}@{step}"

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Any]:
        """Return arguments for `litellm.completion`."""
        name = self.get_inference_name(step)
        return {
            "model": f"hosted_vllm/{name}" if self.trainable else name,
            "base_url": self.inference_base_url,
            "api_key": self.inference_api_key,
            "temperature": 1,
        }

    # -- state and logs --------------------------------------------------------------------------------------------

    @property
    def _folder(self) -> RunFolder:
        return RunFolder(Path(self.base_path) / self.project / "models" / self.name)

    def overwrite_state(self, state: StateType) -> None:
        """Replace the state that is kept with the model, a JSON object."""
        self._folder.write_state(state)

    def write_state(self, state: StateType) -> None:
        """The same as `overwrite_state`."""
        self.overwrite_state(state)

    def merge_state(self, state: dict[str, Any]) -> StateType:
        """Merge an object into the kept state, at every depth. Returns the new state."""
        merged = cast(StateType, merge(self.read_state() or {}, state))
        self.overwrite_state(merged)
        return merged

    def read_state(self) -> StateType | None:
        """Return the kept state, or `None` if there is none."""
        return cast("StateType | None", self._folder.read_state())

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
        `train` records those that it trains. The row also holds what `metrics_builder` collected."""
        at = step if step is not None else await self.get_step()
        builder = self.metrics_builder("train").for_cost_context(
            "eval" if split in ("val", "test") else split
        )
        items = list(trajectories or ())
        groups = in_groups(items)
        with builder.whole():
            row = builder.split_off(metrics or {})
            if trajectories is not None:
                if split in SPLITS:
                    counted = counts(groups, split)
                    builder.split_off({n: v for n, v in counted.items() if n not in (metrics or {})})
                row = summary(groups, builder.split_off) | row
            if split == "train" and metrics is not None:
                self._add_step_metrics(builder, at)
        if trajectories is not None:
            self._folder.write_trajectories(groups, split, at)
            if split in SPLITS:
                builder.add_data(scenario_ids=scenario_ids(groups))
            if self.trainable and self._backend is not None and split == "val":
                await self._backend.log_validation(self, as_groups(items), split)
        if measured := await builder.flush():
            row |= measured
            self.merge_state({METRICS_BUILDER_STATE_KEY: builder.state_dict()})
        if row:
            since = time.monotonic() - self._began
            row = with_sections(row, split) | {"training_step": at, "time/wall_clock_sec": since}
            self._folder.append_metrics(row, at)
            if self.report_metrics is None or "wandb" in self.report_metrics:
                await asyncio.to_thread(self._tracked().log, row, at)

    def metrics_builder(self, cost_context: str | None = None) -> MetricsBuilder:
        """Return the builder of the metrics that the next row of `log` holds besides. Costs are `costs/<context>/...`;
        the context `train` is for rows of the split `train`, `eval` for those of `val` and `test`."""
        if self._builder is None:
            self._builder = MetricsBuilder("train")
            state: dict[str, Any] = self.read_state() or {}
            self._builder.load_state_dict(state.get(METRICS_BUILDER_STATE_KEY, {}))
        return self._builder if cost_context is None else self._builder.for_cost_context(cost_context)

    def activate_metrics_context(self, cost_context: str) -> Token[MetricsBuilder]:
        """Make a builder the one that `journeywork.art.metrics.track_api_cost` adds to."""
        return self.metrics_builder(cost_context).activate()

    def _add_step_metrics(self, builder: MetricsBuilder, step: int) -> None:
        """Add the seconds since the step before had its first row, or since `register`, and the GPUs' cost in them."""
        last, at = self._rowed
        if last == step:
            return  # the time since its first row is the next step's
        self._rowed = (step, time.monotonic())
        seconds = self._rowed[1] - at
        price = getattr(self._backend, "gpu_cost_per_hour_usd", None)
        builder.add_user_timing(step_wall_s=seconds)
        if price is not None:
            builder.add_cost("gpu", seconds * price / 3600)

    def _get_wandb_run(self) -> Any:
        return self._tracked().open()

    def update_wandb_config(self, config: dict[str, Any]) -> None:
        """Merge values into the configuration of the model's run at Weights & Biases."""
        self._tracked().configure(config)

    def _tracked(self) -> WandbRun:
        if self._wandb is None:
            self._wandb = WandbRun(self.project, self.entity, self.name)
        if self._wandb_run is not None:
            self._wandb.use(self._wandb_run)
        return self._wandb

    # -- backend ---------------------------------------------------------------------------------------------------

    def backend(self) -> Backend:
        """Return the backend that the model is registered with. Raises `ValueError` if there is none."""
        if self._backend is None:
            raise ValueError(
                f"model {self.name!r} has no backend: call `await model.register(backend)` first"
            )
        return cast("Backend", self._backend)

    async def register(self, backend: Backend) -> None:
        """Connect the model with a backend."""
        self._backend = backend
        await backend.register(self)
        self._rowed = (-1, time.monotonic())

    async def get_step(self) -> int:
        """Return the step of the newest version; 0 for a model that is not trainable."""
        return await self.backend().get_step(cast(Any, self)) if self.trainable else 0

    def safe_model_dump(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return `model_dump`, called with these arguments, with `config` as `None`: a config may hold anything, also
        what no serializer takes."""
        without = self.model_copy(update={"config": None})
        return {**without.model_dump(*args, **kwargs), "config": None}


class TrainableModel(Model[ModelConfig, StateType], Generic[ModelConfig, StateType]):
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
        **fields: Unpack[ModelFields],
    ) -> None:
        pydantic.BaseModel.__init__(
            self, name=name, project=project, base_model=base_model, config=config, **fields
        )
        self._internal_config = _internal_config

    async def register(self, backend: Backend, _openai_client_config: dict[str, Any] | None = None) -> None:
        """Connect the model with a backend. `_openai_client_config` has no effect: the inference server is the
        installation's."""
        if _openai_client_config:
            log.warning("_openai_client_config has no effect: set vllm.* of the installation (docs/art.md)")
        await super().register(backend)

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
        one. Warns if no row of `log` has the metric, and raises nothing."""
        best = self._folder.best_step(best_checkpoint_metric)
        if best is None:
            log.warning(
                "delete_checkpoints: no row that model.log wrote has the metric %r", best_checkpoint_metric
            )
        else:
            log.info("the best version by %s is %s", best_checkpoint_metric, self.get_inference_name(best))

    async def train_sft(
        self,
        trajectories: Iterable[Trajectory],
        config: TrainSFTConfig | None = None,
        _config: DevTrainSFTConfig | None = None,
        verbose: bool = False,
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
        rates = (
            settings.learning_rate if isinstance(settings.learning_rate, list) else [settings.learning_rate]
        )
        await cast(Any, self.backend()).train_sft(self, batches_of(chats, settings.batch_size), rates)
