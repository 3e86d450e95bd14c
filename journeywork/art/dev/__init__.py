"""Typed dictionaries of ART's experimental options. See docs/art.md for those that have an effect.

| module | contents |
| --- | --- |
| `engine`, `model`, `openai_server`, `train` | the same types, at the modules of ART that define them |
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from journeywork.art.refused import refused_parts

RolloutWeightsMode = Literal["lora", "merged"]

if not TYPE_CHECKING:  # it would hide misspelt names from type checkers
    __getattr__ = refused_parts(__name__)


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
    max_lora_rank: int
    model: str
    served_model_name: str
    generation_config: str


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
    tinker_args: TinkerArgs | None
    tinker_native_args: TinkerArgs | None
    trainer_gpu_ids: list[int]
    inference_gpu_ids: list[int]
    rollout_weights_mode: RolloutWeightsMode
    chat_template_kwargs: dict[str, object]
    chat_template: str
    chat_template_path: str
    chat_template_content_format: str
    chat_template_tool_schema_format: Literal["default", "vllm_openai"]
    allow_unvalidated_arch: bool


class TinkerTrainingClientArgs(TypedDict, total=False):
    """Options of Tinker. Without effect: the installation trains."""

    rank: int
    seed: int | None
    train_mlp: bool
    train_attn: bool
    train_unembed: bool
    user_metadata: dict[str, str] | None


class TinkerArgs(TypedDict, total=False):
    """Options of a Tinker backend. Without effect: the installation trains."""

    renderer_name: str
    training_client_args: TinkerTrainingClientArgs


TinkerNativeArgs = TinkerArgs


class OpenAIServerConfig(TypedDict, total=False):
    """Options of the inference server. Without effect in `register`: it is the installation's (`vllm`)."""

    log_file: str
    server_args: ServerArgs
    engine_args: EngineArgs


class ServerArgs(TypedDict, total=False):
    """Options of the inference server's HTTP side."""

    api_key: str | None
    chat_template: str | None
    lora_modules: list[str] | None
    return_tokens_as_token_ids: bool
    enable_auto_tool_choice: bool
    tool_call_parser: str | None
    reasoning_parser: str | None


def get_openai_server_config(
    model_name: str,
    base_model: str,
    log_file: str,
    lora_path: str | None = None,
    config: OpenAIServerConfig | None = None,
) -> OpenAIServerConfig:
    """Return the options with which ART starts an inference server, with those of `config` in their place. For programs
    that start one themselves: the installation's own server has the settings `vllm`."""
    adapter = {"name": f"{model_name}@{int(Path(lora_path).name)}", "path": lora_path} if lora_path else None
    server: dict[str, Any] = {
        "api_key": "default", "lora_modules": [json.dumps(adapter)] if adapter else None,
        "return_tokens_as_token_ids": True, "enable_auto_tool_choice": True, "tool_call_parser": "hermes",
    }  # fmt: skip
    engine: dict[str, Any] = {
        "model": base_model, "served_model_name": base_model if adapter else model_name, "generation_config": "vllm",
    }  # fmt: skip
    given: dict[str, Any] = {**(config or {})}
    return cast(
        OpenAIServerConfig,
        {
            "log_file": given.get("log_file", log_file),
            "server_args": server | given.get("server_args", {}),
            "engine_args": engine | given.get("engine_args", {}),
        },
    )


class TrainConfig(TypedDict, total=False):
    """Experimental options of a step."""

    allow_training_without_logprobs: bool
    precalculate_logprobs: bool
    logprob_calculation_chunk_size: int
    plot_tensors: bool


class TrainSFTConfig(TypedDict, total=False):
    """Experimental options of supervised fine-tuning."""


SETTINGS: dict[str, str] = {
    "init_args.max_seq_length": "vllm.max_model_len",
    "engine_args.max_model_len": "vllm.max_model_len",
    "peft_args.r": "trainer.lora.rank",
    "peft_args.lora_alpha": "trainer.lora.alpha",
    "trainer_args.learning_rate": "trainer.optimizer.learning_rate",
    "trainer_args.weight_decay": "trainer.optimizer.weight_decay",
    "trainer_args.max_grad_norm": "trainer.optimizer.max_grad_norm",
}
"""Options that are settings of an installation."""
SERVER_OPTIONS: dict[str, str] = {
    "init_args.gpu_memory_utilization": "gpu-memory-utilization",
    "engine_args.gpu_memory_utilization": "gpu-memory-utilization",
    "engine_args.tensor_parallel_size": "tensor-parallel-size",
    "engine_args.enforce_eager": "enforce-eager",
    "engine_args.max_num_seqs": "max-num-seqs",
    "chat_template": "chat-template",
    "chat_template_path": "chat-template",
    "chat_template_content_format": "chat-template-content-format",
    "chat_template_kwargs": "default-chat-template-kwargs",
}
"""Options of vLLM. Prompts are trained as vLLM rendered them, so its template is the trainer's too."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as the largest rank of an adapter."""


def settings_of(config: InternalModelConfig | None) -> tuple[dict[str, Any], list[str]]:
    """Return an installation's settings for the options, and the names of the options that have no effect.

    Raises `ValueError` for two chat templates."""
    options: dict[str, Any] = {}
    for part, value in (config or {}).items():
        if isinstance(value, dict) and part != "chat_template_kwargs":
            options |= {f"{part}.{name}": option for name, option in value.items()}
        else:
            options[part] = value
    options = {name: value for name, value in options.items() if value is not None}
    if {"chat_template", "chat_template_path"} <= options.keys():
        raise ValueError("_internal_config: give chat_template or chat_template_path, not both")
    rank = max(options.get("peft_args.r", 0), options.pop("engine_args.max_lora_rank", 0))
    settings = {SETTINGS[name]: value for name, value in options.items() if name in SETTINGS}
    if options.pop("init_args.load_in_4bit", False):
        settings["trainer.memory.quantization"] = "4bit"
    if rank:
        settings["vllm.max_lora_rank"] = next((r for r in _RANKS if r >= rank), rank)
    if arguments := [
        argument
        for name, value in options.items()
        if name in SERVER_OPTIONS
        for argument in _server_argument(SERVER_OPTIONS[name], value)
    ]:
        settings["vllm.args"] = arguments
    return settings, [name for name in options if name not in SETTINGS | SERVER_OPTIONS]


def _server_argument(name: str, value: Any) -> list[str]:
    """Return an option as vLLM's command line takes it."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
