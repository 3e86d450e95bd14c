"""Folders of models. `art_path` is the `path` of a `LocalBackend` or the `base_path` of a model."""

from __future__ import annotations

from typing import Any

from journeywork.forking import checkpoints_folder


def get_default_art_path() -> str:
    """Return the folder of all projects, in the working directory."""
    return ".art"


def get_models_dir(project_name: str, art_path: str | None = None) -> str:
    """Return the folder of a project's models."""
    return f"{art_path or get_default_art_path()}/{project_name}/models"


def get_output_dir_from_model_properties(project: str, name: str, art_path: str | None = None) -> str:
    """Return the folder of a model by its names."""
    return f"{get_models_dir(project, art_path)}/{name}"


def get_model_dir(model: Any, art_path: str | None = None) -> str:
    """Return the folder of a model."""
    return get_output_dir_from_model_properties(model.project, model.name, art_path)


def get_step_checkpoint_dir(model_output_dir: str, step: int) -> str:
    """Return the folder of a step's checkpoint, of an installation that `LocalBackend` started."""
    project, _, name = model_output_dir.rstrip("/").rsplit("/", 2)
    folder = checkpoints_folder(project.rpartition("/")[2], name)
    return f"{model_output_dir}/journeywork/{folder}/step-{step:08d}"


def get_trajectories_dir(model_output_dir: str) -> str:
    """Return the folder of a model's logged trajectories."""
    return f"{model_output_dir}/trajectories"


def get_trajectories_split_dir(model_output_dir: str, split: str) -> str:
    """Return the folder of a split's logged trajectories, a file `<step>.jsonl` a step."""
    return f"{get_trajectories_dir(model_output_dir)}/{split}"
