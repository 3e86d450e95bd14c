"""What the trainer's commands share: which run they mean, and how they fail."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from pipeline.config import Config, ConfigError
from pipeline.log.broker import BrokerError
from pipeline.running.runs import run_settings
from trainer.checkpoints.checkpoint import CheckpointError


class UsageError(ValueError):
    """An argument that can't be used."""


class FailedError(RuntimeError):
    """What the command was asked for could not be done."""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", help="settings, TOML")
    parser.add_argument("--run-dir", help="run directory; its config.toml is read unless --config is given")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", dest="overrides")


def run_config(args: argparse.Namespace) -> Config:
    """Return the settings of the run that the arguments name; the newest run if they name none. Raises `ConfigError`."""
    return run_settings(args.run_dir, args.config, args.overrides)


def run(name: str, command: Callable[[], None]) -> None:
    """Run `command`; exits 2 on bad usage or settings, 1 on what went wrong, with one line on stderr."""
    try:
        command()
    except (ConfigError, UsageError) as error:
        sys.stderr.write(f"journeyman {name}: {error}\n")
        raise SystemExit(2) from error
    except (CheckpointError, BrokerError, FailedError, OSError) as error:
        sys.stderr.write(f"journeyman {name}: {error}\n")
        raise SystemExit(1) from error
