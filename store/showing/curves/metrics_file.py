"""`metrics.jsonl`: a line per training step and per evaluation of a policy version, in the order of the log.

The last line shows how far the log was read. If a kill truncated it, it is removed at the next start and written
again, so each step is in the file once. Only a step that the log lost in a power cut, and that was trained again, has
two lines: the later one counts.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from store.showing.curves.rows import Key, Row

NAME = "metrics.jsonl"


class MetricsFile:
    """The rows of one run. Its methods block."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self.rows: dict[Key, Row] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._load()

    def _load(self) -> None:
        if not self._path.exists():
            return
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.splitlines():
            row = msgspec.json.decode(line, type=Row)
            self.rows[row.key] = row
        if len(whole) < len(data):
            os.truncate(self._path, len(whole))

    @property
    def newest(self) -> Row | None:
        """The row whose event lies last in the log."""
        return max(self.rows.values(), key=lambda row: row.log_at, default=None)

    def add(self, row: Row) -> bool:
        """Write a row, and return whether it is new."""
        if self.rows.get(row.key) == row:
            return False
        self.rows[row.key] = row
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return True
