"""Settings of the trainer that a requested batch chooses for its own step.

A *batch* is a set of groups that a caller asked to be trained together, in one step. It may bring its own learning
rate, loss and more: those that the operator permits in `trainer.batch_settings`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pipeline.config.checks import check_trainer
from pipeline.config.overrides import convert, merged
from pipeline.config.trainer import TrainerConfig
from pipeline.errors import ConfigError


def with_batch_settings(config: TrainerConfig, batch: Mapping[str, Any]) -> TrainerConfig:
    """Return the settings of a batch's step: `config` with those that the batch chose, by dotted names below `trainer`
    (`loss.type`). A learning rate that it chose is that of the step, whatever the installation's schedule is.

    Raises `ConfigError`, which names the setting, for one that `trainer.batch_settings` does not permit, and for values
    that can't be used, alone or together."""
    over: dict[str, Any] = {}
    for name, value in batch.items():
        section, _, setting = name.partition(".")
        if not setting or not {name, section} & set(config.batch_settings):
            permitted = ", ".join(config.batch_settings) or "none"
            raise ConfigError(
                f"trainer.{name}: this installation does not let a batch choose it; it permits {permitted} "
                "(trainer.batch_settings)"
            )
        over.setdefault(section, {})[setting] = value
    if "optimizer.learning_rate" in batch:  # the rate of this step: no schedule over all steps changes it
        over["optimizer"] = {"schedule": "constant", "warmup_steps": 0} | over["optimizer"]
    settings = convert(merged(msgspec.to_builtins(config), over), TrainerConfig, "trainer")
    check_trainer(settings)
    return settings
