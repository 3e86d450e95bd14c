"""The newest step of a model on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from journeywork.art.refused import refusing
from journeywork.forking import checkpoints_folder

__getattr__ = refusing(__name__)


def get_model_step(model: Any, art_path: str) -> int:
    """Return the newest step of `model` that has a checkpoint in `art_path`, the `path` of its `LocalBackend`; 0 if
    there is none."""
    folder = Path(art_path, model.project, "models", model.name)
    # A fine-tuned base model begins anew, in a run directory whose name sorts behind those before it.
    newest = max(folder.glob("journeywork*"), default=folder)
    checkpoints = newest / checkpoints_folder(model.project, model.name)
    steps = (path.name.removeprefix("step-") for path in checkpoints.glob("step-*"))
    return max((int(step) for step in steps if step.isdigit()), default=0)
