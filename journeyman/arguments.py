"""Types of command-line arguments for argparse."""

from __future__ import annotations

import argparse
import math


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
