"""TensorBoard's event files: a folder per model (and branch), a scalar per metric.

An event file can only be appended to, and a kill may truncate it. Therefore the files are rebuilt from the history at
each start, so that each step is in them once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from store.showing.curves.rows import Row


def _import_without_torch() -> ModuleType:
    """Import the library. It would import torch wherever it is installed, to write its tensors too: that costs each
    store seconds at its start and hundreds of megabytes."""
    torch: Any = sys.modules.get("torch")
    sys.modules["torch"] = None  # type: ignore[assignment] # an import of it raises ImportError
    try:
        import tensorboardX
    finally:
        if torch is None:
            del sys.modules["torch"]
        else:
            sys.modules["torch"] = torch
    return tensorboardX  # type: ignore[no-any-return]


_SummaryWriter: Any = _import_without_torch().SummaryWriter


class TensorBoard:
    """Event files under one folder. Its methods block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}

    def rebuild(self, rows: Iterable[Row]) -> None:
        """Replace all event files by those of `rows`."""
        self.close()
        for old in self._folder.glob("*/events.out.tfevents.*"):
            old.unlink()
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Write a row; it is in the file within two seconds."""
        name = row.model if row.branch == "main" else f"{row.model}+{row.branch}"
        if name not in self._writers:
            # A thread of the library writes. Its `flush` leaves out what that thread has not taken yet.
            self._writers[name] = _SummaryWriter(str(self._folder / name), flush_secs=1)
        for metric, value in row.metrics.items():
            if value is not None:
                self._writers[name].add_scalar(metric, value, row.step, walltime=row.at)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
