"""The names of the trainer's metrics in answers of the gateway, which programs of ART read.

The trainer's own names are those of `policy.checkpoint`'s `metrics`, such as `grad_norm`."""

from __future__ import annotations

import re
from collections.abc import Mapping

ALIASES = {
    "loss": "loss/train",
    "entropy": "loss/entropy",
    "kl": "loss/kl_div",
    "grad_norm": "loss/grad_norm",
    "learning_rate": "loss/learning_rate",
    "step_s": "time/step_trainer_s",
    "tokens": "data/step_trainer_tokens",
    "trajectories": "data/step_num_trajectories",
    "groups": "data/step_num_groups_trainable",
    "reward_mean_all": "train/reward",
    "val_reward_mean": "val/reward",
}
"""ART's names of the trainer's metrics."""
RUN = "run/"
"""Prefix of the means of agents' metrics among the trainer's. ART calls such a metric `train/<name>`."""


def with_art_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the trainer's metrics as `trainer/<name>`, and those that ART has a name for under that name too."""
    both: dict[str, float] = {}
    # Agents' first: a metric that one of them calls "reward" takes no name of the trainer's.
    for name, value in sorted(metrics.items(), key=lambda metric: not metric[0].startswith(RUN)):
        alias = ALIASES.get(name)
        if name.startswith(RUN):
            agents_name = re.sub(r"[^A-Za-z0-9_.-]+", ".", name.removeprefix(RUN)).strip(".")
            name, alias = f"{RUN}{agents_name}", f"train/{agents_name}"
        both[f"trainer/{name}"] = value
        if alias:
            both[alias] = value
    return both
