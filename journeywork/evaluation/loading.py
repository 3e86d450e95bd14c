"""Rollouts and scenarios by name, for the commands `journeywork eval` and `prompt`.

A *rollout* is the user's function `rollout(run, task)` that plays one task; *scenarios* are the tasks. Both are given
as `module:name` from the current folder or the Python path, scenarios also as a JSONL file."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def add_task_options(parser: argparse.ArgumentParser, scenarios_help: str) -> None:
    """Add `--rollout` and `--scenarios`, whose help is `scenarios_help`, for `load_rollout` and `load_scenarios`."""
    parser.add_argument(
        "--rollout",
        required=True,
        metavar="MODULE:FUNCTION",
        help="plays one task: rollout(run, task). The module is imported: its top level runs, so what starts a "
        'training belongs under `if __name__ == "__main__"`',
    )
    parser.add_argument("--scenarios", required=True, metavar="MODULE:NAME|FILE", help=scenarios_help)


def load_object(text: str) -> Any:
    """Return what `module:name` names. The current folder is searched first. Raises `ValueError`."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{text!r} must have the form module:name, such as my.agent:play")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, and imports one that does not
        raise ValueError(f"{text!r}: there is no module {module!r} in {here} or on the Python path") from error
    if not hasattr(imported, name):
        raise ValueError(f"{text!r}: the module {module!r} has no {name!r}")
    return getattr(imported, name)


def load_rollout(text: str) -> Any:
    """Return the function that plays one task. Raises `ValueError`."""
    rollout = load_object(text)
    if not callable(rollout):
        raise ValueError(f"{text!r} is no function but {type(rollout).__name__}")
    return rollout


def load_scenarios(text: str, limit: int | None = None) -> list[Any]:
    """Return the first `limit` tasks (`None`: all) of a list, of a function that returns one, or of a JSONL file.

    Raises `ValueError`, also if there are none."""
    if text.endswith((".jsonl", ".json")):
        tasks: Iterable[Any] = _read_jsonl(Path(text))
    else:
        scenarios = load_object(text)
        tasks = scenarios() if callable(scenarios) else scenarios
        if isinstance(tasks, str) or not isinstance(tasks, Iterable):
            raise ValueError(f"{text!r} is no list of tasks but {type(tasks).__name__}")
    task_list = list(itertools.islice(tasks, limit))
    if not task_list:
        raise ValueError(f"there are no tasks in {text}")
    return task_list


def _read_jsonl(path: Path) -> list[Any]:
    """Return the documents of a JSONL file. Raises `ValueError`, which names the file and the line."""
    try:
        lines = path.read_text("utf-8").split("\n")  # `splitlines` also splits at U+2028, which JSON may hold
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    tasks = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                tasks.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return tasks
