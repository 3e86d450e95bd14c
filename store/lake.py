"""The lake: a Delta table for each event tag. Any program that reads Delta Lake can read it.

from deltalake import DeltaTable
DeltaTable("runs/demo/store/rollout.exchange").to_pandas()
"""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import pyarrow as pa

from pipeline.config import Config, StoreConfig
from pipeline.events import schema
from store import legacy
from store.recovery import DamagedFile, find_damaged_files, recover_journal
from store.storage import DamagedFileError, LocalStorage, Storage, open_storage
from store.table import EventTable


class Lake:
    """The tables in one storage. Safe to use from several threads."""

    def __init__(self, storage: Storage, config: StoreConfig | None = None) -> None:
        self.storage = storage
        self._config = config or StoreConfig()
        self._preparing = threading.Lock()
        self._prepared: set[str] = set()
        self._not_imported: dict[str, list[DamagedFile]] = {}
        """Damaged files of an older store by tag. They are in no table."""
        self._table = functools.cache(lambda tag: EventTable(storage, tag, self._config))

    def __str__(self) -> str:
        return str(self.storage)

    def table(self, tag: str) -> EventTable:
        """Return the table of an event tag. It may have no commit yet."""
        return self._table(tag)

    def tables(self) -> list[EventTable]:
        """Return the tables of all event tags."""
        return [self.table(tag) for tag in schema.tables()]

    def exists(self) -> bool:
        """Return whether anything was ever written here."""
        return self.storage.exists()

    def open(self) -> list[DamagedFile]:
        """Prepare all tables for writing. Return their damaged files, which `store.repair` replaces.

        Raises `LakeError`."""
        damaged: list[DamagedFile] = []
        for table in self.tables():
            self._prepare(table.tag)
            damaged += find_damaged_files(table)
        return damaged + [file for tag in list(self._not_imported) for file in self._not_imported.pop(tag)]

    def append(self, tag: str, rows: pa.Table) -> int:
        """Commit those rows that no file of the tag's table holds, and return their number. See `EventTable.append`.

        Prepares the table first if it was not prepared yet. Raises `LakeError`."""
        self._prepare(tag)
        return self.table(tag).append(rows)

    def _prepare(self, tag: str) -> None:
        """Make a table ready for writing, once per process: move commits aside that a power cut truncated, import the
        files of a store from before Delta Lake, and add the columns that the table lacks."""
        with self._preparing:
            if tag in self._prepared:
                return
            if self.storage.needs_sync:
                recover_journal(self.storage, tag)
            self._not_imported.setdefault(tag, []).extend(legacy.import_files(self.table(tag), self._config))
            self.table(tag).add_missing_columns()
            self._prepared.add(tag)

    def names(self, tag: str) -> list[str]:
        """Return the names of the files that hold a tag's events now, sorted.

        Raises `LakeError`, and `DamagedFileError` for a damaged file of an older store."""
        files = self.table(tag).files()
        return legacy.file_names(self.storage, tag) if files is None else sorted(files.names)

    def check(self, tag: str) -> None:
        """Raise `DamagedFileError` if a file of the newest version is missing or its size is not the one in its commit.

        Raises `LakeError`."""
        if find_damaged_files(self.table(tag)) and (damaged := find_damaged_files(self.table(tag))):
            # It is searched twice because a merge may end between reading the journal and listing the folder.
            raise DamagedFileError(self.storage.url(tag, damaged[0].name), damaged[0].why)


def open_lake(config: Config) -> Lake:
    """Return the lake of a run's settings. Raises `ConfigError` if `store.dir` names no bucket."""
    return Lake(open_storage(config), config.store)


def lake_in(folder: str | Path) -> Lake:
    """Return the lake in a local folder."""
    return Lake(LocalStorage(folder))
