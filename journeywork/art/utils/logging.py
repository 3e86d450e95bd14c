"""ART's lines on the terminal: a time, a kind and a message on standard output."""

from __future__ import annotations

import sys
from datetime import datetime


def _write(kind: str, message: object) -> None:
    sys.stdout.write(f"[{datetime.now():%H:%M:%S}] {kind:<5} {message}\n")


def info(msg: object) -> None:
    """Write a line of the kind INFO."""
    _write("INFO", msg)


def step(msg: object) -> None:
    """Write a line of the kind STEP."""
    _write("STEP", msg)


def ok(msg: object) -> None:
    """Write a line of the kind OK."""
    _write("OK", msg)


def warn(msg: object) -> None:
    """Write a line of the kind WARN."""
    _write("WARN", msg)


def err(msg: object) -> None:
    """Write a line of the kind ERR."""
    _write("ERR", msg)


def dim(msg: object) -> None:
    """Write a message alone."""
    sys.stdout.write(f"{msg}\n")
