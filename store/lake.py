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
from store import older
from store.healing import Damaged, damage, mend_journal
from store.place import DamagedFileError, Folder, Place, open_place
from store.table import EventTable


class Lake:
    """The tables of one place. Safe to use from several threads."""

    def __init__(self, place: Place, config: StoreConfig | None = None) -> None:
        self.place = place
        self._config = config or StoreConfig()
        self._preparing = threading.Lock()
        self._prepared: set[str] = set()
        self._unread: dict[str, list[Damaged]] = {}
        """Damaged files of an older store, which are in no table."""
        self._table = functools.cache(lambda tag: EventTable(place, tag, self._config))

    def __str__(self) -> str:
        return str(self.place)

    def table(self, tag: str) -> EventTable:
        """The table of an event tag, which may have no commit yet."""
        return self._table(tag)

    def tables(self) -> list[EventTable]:
        """The tables of all event tags."""
        return [self.table(tag) for tag in schema.tables()]

    def exists(self) -> bool:
        """Whether anything was ever written here."""
        return self.place.exists()

    def open(self) -> list[Damaged]:
        """Prepare all tables to be written, and look for damaged files, for `store.repair`. Raises `LakeError`."""
        damaged: list[Damaged] = []
        for table in self.tables():
            self._prepare(table.tag)
            damaged += damage(table)
        return damaged + [one for tag in list(self._unread) for one in self._unread.pop(tag)]

    def append(self, tag: str, rows: pa.Table) -> int:
        """Commit those rows that no file holds, as `EventTable.append` does, to a table that is prepared. Raises
        `LakeError`."""
        self._prepare(tag)
        return self.table(tag).append(rows)

    def _prepare(self, tag: str) -> None:
        """Make a table ready to be written, once: mend a journal that a power cut cut, take over the files of a store
        without Delta Lake, add the columns that events have today."""
        with self._preparing:
            if tag in self._prepared:
                return
            if self.place.needs_sync:
                mend_journal(self.place, tag)
            self._unread.setdefault(tag, []).extend(older.take_over(self.table(tag), self._config))
            self.table(tag).evolve()
            self._prepared.add(tag)

    def names(self, tag: str) -> list[str]:
        """The files that hold a tag's events now, sorted. Raises `LakeError`; `DamagedFileError` for the files of an
        older store."""
        files = self.table(tag).files()
        return older.names(self.place, tag) if files is None else sorted(files.names)

    def check(self, tag: str) -> None:
        """Raise `DamagedFileError` where a file of the newest version is missing or has not the size that its commit
        says. Raises `LakeError`."""
        if (damaged := damage(self.table(tag))) and (damaged := damage(self.table(tag))):
            # Found again: it was not a merge that ended between the reading of the journal and of the folder.
            raise DamagedFileError(self.place.url(tag, damaged[0].name), damaged[0].why)


def open_lake(config: Config) -> Lake:
    """The lake of a run's settings. Raises `ConfigError` where `store.dir` names no bucket."""
    return Lake(open_place(config), config.store)


def lake_in(folder: str | Path) -> Lake:
    """The lake in a folder of this machine."""
    return Lake(Folder(folder))
