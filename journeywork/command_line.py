"""Command lines: types of arguments for argparse, and how an error ends a command."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""Exit status after Ctrl-C, as of a shell."""


def at_least_one(text: str) -> int:
    """Return a whole number from 1 for argparse."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"it must be a whole number of at least 1, not {text!r}")
    return int(text)


def not_negative(text: str) -> float:
    """Return a number from 0 for argparse."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"it must be a number of at least 0, not {text!r}")
    return found


@contextmanager
def exit_status(unusable: tuple[type[Exception], ...], failed: tuple[type[Exception], ...]) -> Iterator[None]:
    """Turn errors into an exit with one line on standard error: status 2 for `unusable` arguments, 1 for `failed`, and
    130 after Ctrl-C."""
    try:
        yield
    except (*unusable, *failed) as error:
        sys.stderr.write(f"journeywork: {error}\n")
        raise SystemExit(2 if isinstance(error, unusable) else 1) from error
    except KeyboardInterrupt:
        sys.stderr.write("journeywork: interrupted\n")
        raise SystemExit(INTERRUPTED) from None
