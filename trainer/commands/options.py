"""Shared by the trainer's commands: the selection of an installation, and exit codes."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from pipeline.config import Config, ConfigError
from pipeline.log.broker import BrokerError
from pipeline.running.installations import installation_settings
from pipeline.terminal.parsers import add_overrides, exit_on_error
from trainer.checkpoints.checkpoint import CheckpointError


class UsageError(ValueError):
    """An argument that can't be used."""


class FailedError(RuntimeError):
    """The command failed; the message says why."""


def add_installation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `settings_of` reads."""
    parser.add_argument("--config", help="settings, TOML")
    parser.add_argument("--run-dir", help="run directory; its config.toml is read unless --config is given")
    add_overrides(parser)
    parser.add_argument("--nats-url", help="URL of the log")


def settings_of(args: argparse.Namespace) -> Config:
    """Return the settings of the installation that the arguments name; the newest if they name none. Raises
    `ConfigError`."""
    return installation_settings(args.run_dir, args.config, args.overrides, args.nats_url)


def run(name: str, command: Callable[[], None]) -> None:
    """Run `command`. Where it fails, write one line to stderr and exit: with 2 for a wrong argument or setting, else
    with 1."""
    with exit_on_error(name, (ConfigError, UsageError), (CheckpointError, BrokerError, FailedError, OSError)):
        command()
