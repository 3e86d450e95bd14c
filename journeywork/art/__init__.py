"""Runs programs that were written for ART (openpipe-art 0.5): `import journeywork.art as art`.

    model = art.TrainableModel(name="agent-001", project="tasks", base_model="Qwen/Qwen3-4B")
    await model.register(art.LocalBackend())
    groups = await art.gather_trajectory_groups(
        art.TrajectoryGroup(rollout(model, task) for _ in range(8)) for task in tasks
    )
    await model.train(groups)

It needs the extra `art` (the package `openai`). docs/art.md lists what behaves differently.

| module | contents |
| --- | --- |
| `model` | prompted and trainable models |
| `trajectories` | trajectories, histories, groups |
| `types` | messages, configurations and results of training |
| `gather`, `gathering`, `batches`, `pipeline_trainer` | play many trajectories concurrently; train meanwhile |
| `auto_trajectory`, `yield_trajectory` | trajectories of code that returns something else |
| `records`, `metrics`, `api_costs` | a model's folder: its state, and what it logged; costs and times |
| `tracking` | its run at Weights & Biases |
| `local`, `remote`, `serverless` | backends: an installation here, or at a URL |
| `megatron`, `tinker`, `tinker_native` | ART's other backends, as `local` |
| `captured`, `gateway`, `training`, `supervised` | from runs and conversations to steps |
| `openai`, `guided_completion` | completions of streams; replies that a teacher gave |
| `errors`, `refused` | what a program of ART can't use here, and what to do instead |
| `options` | the options of a step, as settings of the trainer |
| `rewards`, `utils`, `langgraph`, `mcp`, `dev` | as in ART |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import openai  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "journeywork.art needs the package openai: pip install './journeywork[art]'", name=missing.name
    ) from missing

from journeywork.art import dev
from journeywork.art.auto_trajectory import auto_trajectory, capture_auto_trajectory
from journeywork.art.backend import Backend, UnsupportedError
from journeywork.art.batches import trajectory_group_batches
from journeywork.art.captured import NotCapturedError
from journeywork.art.gather import gather_trajectories, gather_trajectory_groups
from journeywork.art.local import LocalBackend
from journeywork.art.model import Model, TrainableModel
from journeywork.art.refused import refused_parts
from journeywork.art.remote import RemoteBackend
from journeywork.art.serverless import ServerlessBackend
from journeywork.art.training import TrainingError
from journeywork.art.trajectories import History, Trajectory, TrajectoryGroup
from journeywork.art.types import (
    LocalTrainResult,
    Messages,
    MessagesAndChoices,
    ServerlessTrainResult,
    Tools,
    TrainConfig,
    TrainResult,
    TrainSFTConfig,
)
from journeywork.art.utils import retry
from journeywork.art.yield_trajectory import capture_yielded_trajectory, yield_trajectory

if not TYPE_CHECKING:  # it would hide misspelt names from type checkers
    __getattr__ = refused_parts(__name__)

__all__ = [
    "Backend",
    "History",
    "LocalBackend",
    "LocalTrainResult",
    "Messages",
    "MessagesAndChoices",
    "Model",
    "NotCapturedError",
    "RemoteBackend",
    "ServerlessBackend",
    "ServerlessTrainResult",
    "Tools",
    "TrainConfig",
    "TrainResult",
    "TrainSFTConfig",
    "TrainableModel",
    "TrainingError",
    "Trajectory",
    "TrajectoryGroup",
    "UnsupportedError",
    "auto_trajectory",
    "capture_auto_trajectory",
    "capture_yielded_trajectory",
    "dev",
    "gather_trajectories",
    "gather_trajectory_groups",
    "retry",
    "trajectory_group_batches",
    "yield_trajectory",
]
