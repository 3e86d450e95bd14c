"""Tensors to the files of a checkpoint, and back.

Apart from `checkpoint`, so that commands which only copy files do not import PyTorch."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import safetensors.torch
import torch

from pipeline.events import STATE_FILE
from trainer.engine.state import TrainState, Weights

if TYPE_CHECKING:
    from peft import LoraConfig


def adapter_config(lora: LoraConfig, base: str) -> bytes:
    """Return the content of `adapter_config.json` for an adapter of the base model `base`."""
    settings = {k: v for k, v in lora.to_dict().items() if v is not None}
    settings |= {"base_model_name_or_path": base, "inference_mode": True}
    settings["target_modules"] = sorted(settings["target_modules"])
    return msgspec.json.format(msgspec.json.encode(settings, order="sorted", enc_hook=_plain), indent=2)


def adapter_files(weights: Weights, lora: LoraConfig, base: str) -> dict[str, bytes]:
    """Return the files of a PEFT adapter folder by name. The same weights give the same bytes."""
    return {
        "adapter_config.json": adapter_config(lora, base),
        "adapter_model.safetensors": safetensors.torch.save({k: v.contiguous() for k, v in weights.items()}),
    }


def _plain(value: Any) -> Any:
    """Return a value of PEFT's settings in a type of JSON: a set as a sorted list, an enum's member as its value."""
    return sorted(value) if isinstance(value, set) else str(getattr(value, "value", value))


def weights_of(files: Mapping[str, bytes]) -> Weights:
    """Return the tensors among an adapter's files."""
    weights: Weights = safetensors.torch.load(files["adapter_model.safetensors"])
    return weights


def state_bytes(state: TrainState) -> bytes:
    """Return the content of `state.pt`: what the adapter's files do not hold of the training state."""
    out = io.BytesIO()
    torch.save({name: getattr(state, name) for name in ("optimizer", "master", "average")}, out)
    return out.getvalue()


def state_of(step: int, files: Mapping[str, bytes]) -> TrainState:
    """Return the training state in the files of the checkpoint of `step`."""
    state = torch.load(io.BytesIO(files[STATE_FILE]), weights_only=True)
    weights = weights_of(files)
    return TrainState(step, weights, state["optimizer"], {step: weights}, state["master"], state["average"])
