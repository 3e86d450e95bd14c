"""TensorBoard's event files: a folder per model (and branch), a scalar per metric.

An event file can only be appended to, and a kill may cut off its end. So the files are made anew from the history at
each start: a step is in them once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tensorboardX import SummaryWriter

from store.curves.rows import Row


class TensorBoard:
    """Event files under one folder. Its methods block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, SummaryWriter] = {}

    def rebuild(self, rows: Iterable[Row]) -> None:
        """Replace all event files by those of `rows`."""
        self.close()
        for old in self._folder.glob("*/events.out.tfevents.*"):
            old.unlink()
        for row in rows:
            self._put(row)
        self._flush()

    def add(self, row: Row) -> None:
        self._put(row)
        self._flush()

    def _put(self, row: Row) -> None:
        name = row.model if row.branch == "main" else f"{row.model}+{row.branch}"
        if name not in self._writers:
            self._writers[name] = SummaryWriter(str(self._folder / name))
        for metric, value in row.metrics.items():
            if value is not None:
                self._writers[name].add_scalar(metric, value, row.step, walltime=row.at)

    def _flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
