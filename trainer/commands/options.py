"""Shared by the trainer's commands: the selection of an installation, and exit codes."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager

from pipeline.config import ConfigError
from pipeline.log.broker import BrokerError
from pipeline.terminal.parsers import add_overrides, exit_on_error
from trainer.checkpoints.checkpoint import CheckpointError
from trainer.checkpoints.commits import TrainerError


def add_installation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name an installation: `config`, `run_dir` and `overrides` of `installation_settings`."""
    parser.add_argument("--config", help="settings, TOML")
    parser.add_argument("--run-dir", help="run directory; its config.toml is read unless --config is given")
    add_overrides(parser)


def running(name: str) -> AbstractContextManager[None]:
    """Return the context in which the command `name` runs. If the command fails, one line is written to stderr and the
    program exits: with 2 for a wrong argument or setting, else with 1."""
    return exit_on_error(name, (ConfigError,), (CheckpointError, TrainerError, BrokerError, OSError))
