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
| `gather`, `progress`, `pipeline_trainer` | play many trajectories concurrently; train meanwhile |
| `records` | a model's folder, and its run at Weights & Biases: its state, and what it logged |
| `backend`, `serverless` | an installation at a URL |
| `local` | an installation on this machine |
| `megatron`, `tinker`, `tinker_native` | ART's other backends, as `local` |
| `captured`, `gateway`, `training` | from runs and conversations to steps |
| `dev` | the options of a model and of a step, as settings of the installation |
| `guided_completion` | replies that a teacher gave |
| `errors` | what a program of ART can't use here |
| `rewards`, `utils`, `langgraph`, `mcp` | as in ART |
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
from journeywork.art.backend import RemoteBackend, ServerlessBackend
from journeywork.art.captured import NotCapturedError
from journeywork.art.errors import UnsupportedError, no_attribute
from journeywork.art.gather import gather_trajectories, gather_trajectory_groups
from journeywork.art.local import LocalBackend
from journeywork.art.model import Model, TrainableModel
from journeywork.art.training import TrainingError
from journeywork.art.trajectories import History, Trajectory, TrajectoryGroup
from journeywork.art.types import Messages, MessagesAndChoices, Tools, TrainConfig, TrainResult, TrainSFTConfig
from journeywork.art.utils import retry

if not TYPE_CHECKING:  # it would hide misspelt names from type checkers
    __getattr__ = no_attribute(__name__)

__all__ = [
    "History",
    "LocalBackend",
    "Messages",
    "MessagesAndChoices",
    "Model",
    "NotCapturedError",
    "RemoteBackend",
    "ServerlessBackend",
    "Tools",
    "TrainConfig",
    "TrainResult",
    "TrainSFTConfig",
    "TrainableModel",
    "TrainingError",
    "Trajectory",
    "TrajectoryGroup",
    "UnsupportedError",
    "dev",
    "gather_trajectories",
    "gather_trajectory_groups",
    "retry",
]
