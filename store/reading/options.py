"""What the commands over the history share: the arguments that name an installation, and their exit statuses."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import duckdb

from pipeline.config import ConfigError
from pipeline.errors import BrokerError
from pipeline.names import InvalidNameError
from pipeline.terminal.printing import visible
from store.lake.storage import StoreError

_WRONG = (ConfigError, InvalidNameError, duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException)
"""An argument, a setting or a query is wrong."""
_FAILED = (StoreError, BrokerError, duckdb.Error, OSError)


def add_installation(parser: argparse.ArgumentParser) -> None:
    """Add `--run-dir` and `--config`, which `installation_settings` takes."""
    parser.add_argument("--run-dir", help="default: the running one under runs/, else the newest")
    parser.add_argument("--config", help="settings, in place of the installation's own")


def run_command(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
    *failures: type[Exception],
) -> int:
    """Parse `argv` (default: the command line) and run a command with it. Return its status, or, with the error on
    stderr, 2 if an argument, a setting or a query is wrong, and 1 if the store, the log or one of the command's own
    `failures` ends it."""
    args = parser.parse_args(argv)
    expected: tuple[type[Exception], ...] = (*_WRONG, *_FAILED, *failures)
    try:
        return run(args)
    except expected as error:
        sys.stderr.write(visible(f"{parser.prog}: {error}") + "\n")
        return 2 if isinstance(error, _WRONG) else 1
