"""Whether a checkpoint can be continued: it needs the base model and the adapter's shape that it was trained with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from pipeline.config import ConfigError
from pipeline.events import CheckpointPublished
from trainer.checkpoints.tensors import adapter_config

if TYPE_CHECKING:
    from peft import LoraConfig

_ADAPTER_SETTINGS = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
"""Keys of adapter_config.json that a run can't change, and the settings under `trainer.lora` that they come from."""


def require_compatible(
    event: CheckpointPublished | None, files: Mapping[str, bytes], digest: str, lora: LoraConfig, name: str
) -> None:
    """Raise `ConfigError` if training can't continue from a checkpoint with the loaded model.

    `event`: the checkpoint's, `None` for an adapter that was trained elsewhere; `files`: those of its adapter; `name`:
    what the error calls it. `digest`, `lora`: of the loaded model."""
    if event is not None and event.base_digest != digest:
        raise ConfigError(
            f"models.base: {name} was trained on another base model ({event.base_model}): name that one, or "
            "give this model another name or project, where it begins at step 0"
        )
    trained: dict[str, Any] = msgspec.json.decode(files["adapter_config.json"])
    now: dict[str, Any] = msgspec.json.decode(adapter_config(lora, ""))
    for key, setting in _ADAPTER_SETTINGS.items():
        if _unordered(trained.get(key)) != _unordered(now.get(key)):
            raise ConfigError(
                f"trainer.lora.{setting}: {name} was trained with {trained.get(key)}, not with {now.get(key)}: set it "
                "so, or give the model another name, under which it begins at step 0; or merge the adapter into its "
                "base, and name the merged model as models.base"
            )


def _unordered(value: Any) -> Any:
    """Return a list sorted, so that lists with the same items are equal; an empty one as `None`, like a missing one."""
    return sorted(value) or None if isinstance(value, list) else value
