"""Imports that have to come before those of the rest of the trainer.

Unsloth patches transformers, PEFT and TRL when it is imported, and has to be imported before them. This module
imports none of them. Commands that train call it before they import modules that do.
"""

from __future__ import annotations

import importlib
import sys

from pipeline.config import Config, ConfigError

_AFTER = ("transformers", "peft", "trl")


def import_first(config: Config) -> None:
    """Import Unsloth where `config` trains a model with it.

    Raises `ConfigError` where it is not installed, and `RuntimeError` where a library that it patches is imported
    already."""
    if all(config.trainer_of(model).engine != "unsloth" for model in config.models):
        return
    if "unsloth" not in sys.modules and (early := [name for name in _AFTER if name in sys.modules]):
        raise RuntimeError(f"unsloth has to be imported before {', '.join(early)}")
    try:
        importlib.import_module("unsloth")
    except ModuleNotFoundError as error:
        if error.name != "unsloth":
            raise
        raise ConfigError("trainer.engine: unsloth is not installed: install it, or set `transformers`") from error
