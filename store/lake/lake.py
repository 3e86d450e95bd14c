"""The lake: a Delta table for each event tag. Any program that reads Delta Lake can read it.

from deltalake import DeltaTable
DeltaTable("runs/demo/store/rollout.exchange").to_pandas()
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from pipeline.config import Config, StoreConfig
from pipeline.events import schema
from store.lake.commits import recover_journal
from store.lake.storage import LocalStorage, Storage, open_storage
from store.lake.table import EventTable


class Lake:
    """The tables in one storage. Safe to use from several threads."""

    def __init__(self, storage: Storage, config: StoreConfig | None = None) -> None:
        self.storage = storage
        self.table: Callable[[str], EventTable] = functools.cache(lambda tag: EventTable(storage, tag, config))
        """Returns the table of an event tag. It may have no commit yet."""
        self._preparing = threading.Lock()
        self._prepared: set[str] = set()

    def __str__(self) -> str:
        return str(self.storage)

    def tables(self) -> list[EventTable]:
        """Return the tables of all event tags."""
        return [self.table(tag) for tag in schema.tables()]

    def prepare(self) -> None:
        """Make all tables ready for writing. Raises one of `LAKE_ERRORS`."""
        for table in self.tables():
            self._prepare(table.tag)

    def append(self, tag: str, rows: pa.Table) -> int:
        """Commit those rows that no file of the tag's table holds, and return their number. See `EventTable.append`.

        Prepares the table first if it was not prepared yet. Raises one of `LAKE_ERRORS`."""
        self._prepare(tag)
        return self.table(tag).append(rows)

    def _prepare(self, tag: str) -> None:
        """Make a table ready for writing, once per lake object: move commits aside that a power cut truncated, and add
        the columns that the table lacks."""
        with self._preparing:
            if tag in self._prepared:
                return
            if self.storage.needs_sync:
                recover_journal(self.storage, tag)
            self.table(tag).add_missing_columns()
            self._prepared.add(tag)

    def names(self, tag: str) -> list[str]:
        """Return the names of the files that hold a tag's events now, sorted. Raises one of `LAKE_ERRORS`."""
        return sorted(self.table(tag).files().names)


def open_lake(config: Config) -> Lake:
    """Return the lake of a run's settings. Raises `ConfigError` if `store.dir` names no bucket."""
    return Lake(open_storage(config), config.store)


def lake_in(folder: str | Path) -> Lake:
    """Return the lake in a local folder."""
    return Lake(LocalStorage(folder))
