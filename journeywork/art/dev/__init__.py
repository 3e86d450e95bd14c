"""Typed dictionaries of ART's experimental options. See docs/art.md for those that have an effect."""

from __future__ import annotations

from typing import Any, TypedDict


class InitArgs(TypedDict, total=False):
    """How the base model is loaded."""

    max_seq_length: int
    load_in_4bit: bool
    gpu_memory_utilization: float
    fast_inference: bool


class EngineArgs(TypedDict, total=False):
    """Options of the inference server."""

    max_model_len: int
    gpu_memory_utilization: float
    enforce_eager: bool
    max_num_seqs: int
    tensor_parallel_size: int


class PeftArgs(TypedDict, total=False):
    """The adapter."""

    r: int
    lora_alpha: int
    target_modules: list[str]


class TrainerArgs(TypedDict, total=False):
    """The optimizer."""

    learning_rate: float
    weight_decay: float
    max_grad_norm: float


class InternalModelConfig(TypedDict, total=False):
    """Experimental options of a model. `LocalBackend` takes those that are settings of an installation."""

    init_args: InitArgs
    engine_args: EngineArgs
    peft_args: PeftArgs
    trainer_args: TrainerArgs


class TrainConfig(TypedDict, total=False):
    """Experimental options of a step."""

    allow_training_without_logprobs: bool
    precalculate_logprobs: bool
    logprob_calculation_chunk_size: int
    plot_tensors: bool


class TrainSFTConfig(TypedDict, total=False):
    """Experimental options of supervised fine-tuning."""


SETTINGS: dict[tuple[str, str], str] = {
    ("init_args", "max_seq_length"): "vllm.max_model_len",
    ("engine_args", "max_model_len"): "vllm.max_model_len",
    ("init_args", "load_in_4bit"): "trainer.unsloth.load_in_4bit",
    ("peft_args", "r"): "trainer.lora.rank",
    ("peft_args", "lora_alpha"): "trainer.lora.alpha",
    ("trainer_args", "learning_rate"): "trainer.optimizer.learning_rate",
    ("trainer_args", "weight_decay"): "trainer.optimizer.weight_decay",
    ("trainer_args", "max_grad_norm"): "trainer.optimizer.max_grad_norm",
}
"""Options with an effect, and the settings that they are."""


def settings_of(config: InternalModelConfig | None) -> tuple[dict[str, Any], list[str]]:
    """Return an installation's settings for the options, and the names of the options that have no effect."""
    found: dict[str, Any] = {}
    without_effect: list[str] = []
    for part, options in (config or {}).items():
        if not isinstance(options, dict):
            without_effect.append(part)
            continue
        for name, value in options.items():
            setting = SETTINGS.get((part, name))
            if setting is None:
                without_effect.append(f"{part}.{name}")
            elif value is not None:
                found[setting] = value
    return found, without_effect
