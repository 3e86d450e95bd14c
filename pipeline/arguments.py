"""Types of command-line arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """A `type` for `ArgumentParser.add_argument`: a whole number from `least` to `most`, or without an upper limit.

    The parser ends the command with status 2 and a message that names the range for any other text."""
    wanted = (
        f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    )

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return number

    return read
