"""Options and answers that all commands of the judge have."""

from __future__ import annotations

import argparse

from pipeline.terminal.parsers import add_overrides


def add_settings(parser: argparse.ArgumentParser, config_help: str = "settings, TOML") -> None:
    """Add `--config FILE` and `--set section.key=value`, which become `config` and `overrides`."""
    parser.add_argument("--config", default="", help=config_help)
    add_overrides(parser)


def figure_text(value: object) -> str:
    """Return a figure of a report as text: `-` if there is none."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
