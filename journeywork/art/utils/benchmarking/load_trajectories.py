"""Logged trajectories as a table of polars."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from journeywork.art.refused import refusing
from journeywork.art.utils.output_dirs import get_models_dir

__getattr__ = refusing(__name__)
_LOGGED = ("reward", "messages", "logs")


async def load_trajectories(
    project_name: str, models: Sequence[str] | None = None, debug: bool = False, art_path: str | None = None
) -> Any:
    """Return a `polars.DataFrame` with a row for each trajectory that the models of a project (default: all) logged
    below `art_path`: `model`, `split`, `step`, `group_number`, `reward`, `messages`, `logs`, `metric_<name>`,
    `metadata_<name>`, `group_metric_<name>` and `group_metadata_<name>`. Without any it has no columns. `debug` has no
    effect. Raises `ModuleNotFoundError` where polars is not installed."""
    polars: Any = importlib.import_module("polars")
    rows = await asyncio.to_thread(lambda: list(_rows(Path(get_models_dir(project_name, art_path)), models)))
    return polars.DataFrame(rows, infer_schema_length=None)


def _rows(folder: Path, models: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    number = 0
    for file in sorted(folder.glob("*/trajectories/*/*.jsonl")):
        model, _, split, _ = file.relative_to(folder).parts
        if models is not None and model not in models:
            continue
        for line in file.read_text("utf-8").splitlines():
            group = json.loads(line)
            number += 1
            shared = _columns(group, "group_")
            for trajectory in group["trajectories"]:
                named = {"model": model, "split": split, "step": int(file.stem), "group_number": number}
                yield named | {name: trajectory[name] for name in _LOGGED} | _columns(trajectory) | shared


def _columns(logged: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    metrics = {f"{prefix}metric_{name}": float(value) for name, value in logged["metrics"].items()}
    return metrics | {f"{prefix}metadata_{name}": str(value) for name, value in logged["metadata"].items()}
