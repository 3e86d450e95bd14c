"""ART's options of a training step, as settings of the trainer.

ART's loss, at its defaults: CISPO against the recorded logprobs, with the ratio clipped from 0 to 5; each trajectory
has the same weight; the advantages of a step are divided by the mean of their absolute values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from journeywork.art.backend import UnsupportedError

LEARNING_RATE = 5e-6
"""ART's default."""
_LOSS: dict[str, Any] = {
    "loss_fn": "cispo", "ppo": False, "epsilon": None, "epsilon_high": None, "normalize_advantages": True,
    "scale_rewards": True, "advantage_balance": 0.0, "kl_penalty_coef": 0.0, "importance_sampling_level": "token",
    "truncated_importance_sampling": None, "max_negative_advantage_importance_sampling_weight": None,
}  # fmt: skip
"""Options that choose the loss, with ART's defaults."""
_REFUSED: dict[str, tuple[Any, str]] = {
    "loss_fn_config": (None, "ART's LocalBackend takes none either"),
    "adam_params": (None, "set trainer.optimizer of the installation"),
    "kl_penalty_reference_step": (None, "the reference of the KL penalty is the base model"),
    "kl_ref_adapter_path": (None, "the reference of the KL penalty is the base model"),
    "mask_prob_ratio": (
        False,
        "clip the ratio with epsilon_high, or set trainer.loss.importance_sampling to token_mask",
    ),
    "kimi_k2_tau": (None, "use kl_penalty_coef"),
    "scale_learning_rate_by_reward_std_dev": (False, "pass the learning rate"),
    "num_trajectories_learning_rate_multiplier_power": (0.0, "pass the learning rate"),
}
"""Options that the trainer has nothing for: ART's default, and what to do instead."""
_WITHOUT_EFFECT = frozenset((
    "grad_accumulation_sequences", "precalculate_logprobs", "plot_tensors", "logprob_calculation_chunk_size",
    "packed_sequence_length", "save_checkpoint", "verbose", "moe_routing_replay_path", "moe_routing_replay_strict",
    "moe_routing_replay_bundle", "allow_training_without_logprobs",
))  # fmt: skip
"""Options that change how much memory or time a step takes, or what is shown, or that concern calls without logprobs:
every recorded call has them."""


def step_settings(learning_rate: float | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trainer's settings for one step, by their names below `trainer`. Empty without options: the step is
    trained as the installation says.

    A single option of the loss chooses the whole loss, with ART's defaults for the others. Raises `UnsupportedError`
    for one that the trainer can't honour, and `TypeError` for an unknown one."""
    loss: dict[str, Any] = {}
    for name, value in options.items():
        if name in _LOSS:
            loss[name] = value
        elif name in _REFUSED:
            default, instead = _REFUSED[name]
            if value != default:
                raise UnsupportedError(
                    f"train(): {name}={value!r} can't be honoured; {instead} (docs/art.md)"
                )
        elif name not in _WITHOUT_EFFECT:
            raise TypeError(f"train() has no option {name!r}")
    settings = loss_settings(loss) if loss else {}
    if learning_rate is not None:
        settings["optimizer.learning_rate"] = learning_rate
    return settings


def loss_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ART's loss with these options, and its defaults for the others. Raises
    `UnsupportedError`."""
    o = _LOSS | dict(options)
    if o["loss_fn"] not in ("cispo", "ppo"):
        raise UnsupportedError(f"train(): loss_fn={o['loss_fn']!r} is not one of ART's: cispo, ppo")
    ppo = o["ppo"] or o["loss_fn"] == "ppo"
    if o["importance_sampling_level"] not in ("token", "sequence"):
        raise UnsupportedError(
            f"train(): importance_sampling_level={o['importance_sampling_level']!r} can't be honoured; use token or "
            "sequence"
        )
    settings = {
        "loss.type": "dapo" if ppo else "cispo",
        "loss.importance_sampling": "none",
        "loss.importance_level": o["importance_sampling_level"],
        "loss.weighting": "trajectory",
        "loss.advantage_scaling": "group" if o["scale_rewards"] and o["normalize_advantages"] else "none",
        "loss.advantage_normalization": "mean_abs",
        "loss.advantage_balance": o["advantage_balance"],
        "loss.kl_penalty": o["kl_penalty_coef"],
        "loss.beta": 0.0,
    }
    settings |= _ppo_clip(o) if ppo else _cispo_clip(o)
    if o["truncated_importance_sampling"]:
        # ART multiplies by this ratio besides its own, unless it computes the old logprobs again
        # (`precalculate_logprobs`), which makes its own 1. Here it is always 1 then.
        settings["loss.importance_sampling"] = "token_truncate"
        settings["loss.importance_clip"] = o["truncated_importance_sampling"]
    return settings


def _cispo_clip(o: Mapping[str, Any]) -> dict[str, Any]:
    if o["epsilon"] is not None and o["epsilon"] < 1:
        raise UnsupportedError(
            f"train(): epsilon={o['epsilon']!r} would be a lower limit of CISPO's ratio, which the trainer lacks; "
            "leave it out, or use loss_fn='ppo'"
        )
    # ART's limit is a distance from 1, the trainer's the ratio itself.
    limit = 1 + (4.0 if o["epsilon_high"] is None else o["epsilon_high"])
    weight = o["max_negative_advantage_importance_sampling_weight"]
    return {"loss.epsilon_high": min(limit, weight) if weight else limit, "loss.delta": None}


def _ppo_clip(o: Mapping[str, Any]) -> dict[str, Any]:
    epsilon = 0.2 if o["epsilon"] is None else o["epsilon"]
    high = epsilon if o["epsilon_high"] is None else o["epsilon_high"]
    weight = o["max_negative_advantage_importance_sampling_weight"]
    if weight and weight <= 1 + high:
        raise UnsupportedError(
            f"train(): max_negative_advantage_importance_sampling_weight={weight!r} must be above 1 + epsilon_high "
            f"({1 + high:g})"
        )
    return {"loss.epsilon": epsilon, "loss.epsilon_high": high, "loss.delta": weight or None}
