"""The commands of `journeywork` that live in a folder of their own: module, and what `--help` says."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

SDK = {
    "eval": ("journeywork.evaluation.command", "play held-out tasks with versions and outside models"),
    "prompt": ("journeywork.evaluation.prompting", "improve a system prompt on tasks, before weights"),
    "init": ("journeywork.starter.command", "write a starter project"),
}
"""Commands that need the SDK only."""


def run_module(module: str, args: Sequence[str]) -> None:
    """Become `python -m module args`. Does not return."""
    os.execv(sys.executable, [sys.executable, "-m", module, *args])  # noqa: S606 - a module of ours
