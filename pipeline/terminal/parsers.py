"""What commands share: their parsers, and how an error ends them.

A command's errors are one line on standard error. Status 2 says that an argument, a setting or a file can't be used,
status 1 that the work failed."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.terminal.printing import visible

Errors = tuple[type[Exception], ...]


def command_parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """Return the parser of `journeywork <name>`. Its help shows `text` with its lines as they are."""
    return argparse.ArgumentParser(
        prog=f"journeywork {name}",
        description=inspect.cleandoc(text or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_overrides(parser: argparse.ArgumentParser, help_text: str = "any setting; may be repeated") -> None:
    """Add `--set section.key=value`. The parsed arguments hold its texts as the list `overrides`
    (`pipeline.config.load`)."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="section.key=value", dest="overrides", help=help_text
    )


@contextmanager
def exit_on_error(command: str, unusable: Errors, failed: Errors = ()) -> Iterator[None]:
    """End the program with one line on standard error if the block raises one of these errors: with status 2 for those
    of `unusable` (an argument, setting or file can't be used), with 1 for those of `failed`."""
    try:
        yield
    except (*unusable, *failed) as error:
        sys.stderr.write(visible(f"journeywork {command}: {error}") + "\n")
        raise SystemExit(2 if isinstance(error, unusable) else 1) from error
