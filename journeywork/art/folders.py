"""Folders of versions, as the trainer and the store name them."""

from __future__ import annotations

from urllib.parse import quote


def checkpoints_folder(project: str, model: str) -> str:
    """Return the folder of a model's versions on the branch `main`, relative to a run directory or a lake.

    Names are escaped: `qwen2.5` becomes `qwen2%2E5`."""
    escaped = (quote(name, safe="@:+=,~").replace(".", "%2E") for name in (project, model))
    return "checkpoints/" + "/main/".join(escaped)
