"""ART's options of a model and of a step, as settings of an installation.

ART's loss: CISPO against the recorded logprobs, with the ratio clipped from 0 to 5; each trajectory has the same
weight; the advantages of a step are divided by the mean of their absolute values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from journeywork.art.errors import UnsupportedError, no_attribute

if not TYPE_CHECKING:  # it would hide misspelt names from type checkers
    __getattr__ = no_attribute(__name__)

LEARNING_RATE = 5e-6
"""ART's default."""


InitArgs: TypeAlias = dict[str, Any]
"""How the base model is loaded: `max_seq_length`, `load_in_4bit`."""
EngineArgs: TypeAlias = dict[str, Any]
"""Options of the inference server: `max_model_len` and those of `_SERVER_OPTIONS`."""
InternalModelConfig: TypeAlias = dict[str, Any]
"""ART's experimental options of a model, by name: `init_args` and `engine_args`. `LocalBackend` takes those that are
settings of an installation, and warns of the others. Programs call these three as ART's classes."""

_SERVER_OPTIONS = ("gpu_memory_utilization", "tensor_parallel_size", "enforce_eager", "max_num_seqs")
"""Options of the engine that vLLM's command line takes under the same names."""


def settings_of(config: InternalModelConfig | None) -> tuple[dict[str, Any], list[str]]:
    """Return an installation's settings for the options, and the names of the options that have no effect."""
    parts: dict[str, Any] = {**(config or {})}
    init, engine = dict(parts.pop("init_args", {})), dict(parts.pop("engine_args", {}))
    settings: dict[str, Any] = {}
    for length in (init.pop("max_seq_length", None), engine.pop("max_model_len", None)):
        if length is not None:
            settings["vllm.max_model_len"] = length
    if init.pop("load_in_4bit", False):
        settings["trainer.memory.quantization"] = "4bit"
    arguments: list[str] = []
    for name in _SERVER_OPTIONS:
        value, argument = engine.pop(name, None), name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{argument}" if value else f"--no-{argument}")
        elif value is not None:
            arguments += [f"--{argument}", str(value)]
    if arguments:
        settings["vllm.args"] = arguments
    return settings, [*init, *engine, *parts]


_WITHOUT_EFFECT = ("logprob_calculation_chunk_size", "packed_sequence_length", "verbose")
"""Options that change how much memory or time a step takes, or what is shown."""


def step_settings(learning_rate: float | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trainer's settings for one step, by their names below `trainer`. Empty without options: the step is
    trained as the installation says. `loss_fn` and `kl_penalty_coef` choose ART's loss.

    Raises `UnsupportedError` for another option that has a value."""
    others = {n: v for n, v in options.items() if v is not None and n not in _WITHOUT_EFFECT}
    loss_fn, penalty = others.pop("loss_fn", None), others.pop("kl_penalty_coef", None)
    if loss_fn not in (None, "cispo"):
        others["loss_fn"] = loss_fn
    if others:
        listed = ", ".join(f"{name}={value!r}" for name, value in others.items())
        raise UnsupportedError(
            f"train() can't honour {listed}: set trainer.loss or trainer.optimizer of the installation (docs/art.md)"
        )
    settings = loss_settings(penalty or 0.0) if loss_fn or penalty is not None else {}
    if learning_rate is not None:
        settings["optimizer.learning_rate"] = learning_rate
    return settings


def loss_settings(kl_penalty: float = 0.0) -> dict[str, Any]:
    """Return the settings of ART's loss, with a penalty of `kl_penalty` for the distance from the base model."""
    return {
        "loss.type": "cispo",
        "loss.importance_sampling": "none",
        "loss.importance_level": "token",
        "loss.weighting": "trajectory",
        "loss.advantage_scaling": "group",
        "loss.advantage_normalization": "mean_abs",
        "loss.kl_penalty": kl_penalty,
        "loss.beta": 0.0,
        "loss.epsilon_high": 5.0,
    }
