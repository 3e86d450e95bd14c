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
    """The content of `adapter_config.json`."""
    settings = {k: v for k, v in lora.to_dict().items() if v is not None}
    settings |= {"base_model_name_or_path": base, "inference_mode": True}
    settings["target_modules"] = sorted(settings["target_modules"])
    return msgspec.json.format(msgspec.json.encode(settings, order="sorted", enc_hook=_plain), indent=2)


def adapter_files(weights: Weights, lora: LoraConfig, base: str) -> dict[str, bytes]:
    """The files of a PEFT adapter folder by name. The same weights give the same bytes."""
    return {
        "adapter_config.json": adapter_config(lora, base),
        "adapter_model.safetensors": safetensors.torch.save({k: v.contiguous() for k, v in weights.items()}),
    }


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(getattr(value, "value", value))


def weights_of(files: Mapping[str, bytes]) -> Weights:
    """The tensors of an adapter's files."""
    weights: Weights = safetensors.torch.load(files["adapter_model.safetensors"])
    return weights


def state_bytes(state: TrainState) -> bytes:
    """The content of `state.pt`."""
    out = io.BytesIO()
    torch.save({name: getattr(state, name) for name in ("optimizer", "master", "average")}, out)
    return out.getvalue()


def state_of(step: int, files: Mapping[str, bytes]) -> TrainState:
    """The training state that the files of the checkpoint of `step` hold."""
    state = torch.load(io.BytesIO(files[STATE_FILE]), weights_only=True)
    weights = weights_of(files)
    return TrainState(step, weights, state["optimizer"], {step: weights}, state["master"], state["average"])
