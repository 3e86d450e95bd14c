"""What has to be imported before anything else of the trainer.

Unsloth patches transformers, PEFT and TRL as it is imported, and has to come before them. So this module imports none of them, and
the commands that train call it before they import what does.
"""

from __future__ import annotations

import importlib
import sys

from pipeline.config import Config, ConfigError

_AFTER = ("transformers", "peft", "trl")


def import_first(config: Config) -> None:
    """Import Unsloth where a model of `config` is trained with it.

    Raises `ConfigError` where it is not installed, and `RuntimeError` where a library that it patches was imported before it."""
    if all(config.trainer_of(model).engine != "unsloth" for model in config.models):
        return
    if "unsloth" not in sys.modules and (early := [name for name in _AFTER if name in sys.modules]):
        raise RuntimeError(f"unsloth has to be imported before {', '.join(early)}")
    try:
        importlib.import_module("unsloth")
    except ModuleNotFoundError as error:
        if error.name != "unsloth":
            raise
        raise ConfigError(
            "trainer.engine: unsloth is not installed; install it, or use `transformers`"
        ) from error
