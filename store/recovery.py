"""Finds what a power cut or a failing disk did to a table when the store starts.

delta-rs never calls fsync, so a power cut can truncate the newest commits of a table's journal (Delta's transaction
log). A truncated commit was never acknowledged: it is moved aside, and the log delivers its events again. A damaged
data file is reported, and `store.repair` reads its events from the log again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from pyarrow import fs

from pipeline.telemetry.logs import get_logger
from store.commits import read_commit
from store.storage import LOG, DamagedFileError, Storage
from store.table import EventTable

log = get_logger("store.recovery")

_MAX_CHECKED = 20_000
"""Number of newest files of a table that are checked. A table has more only if merging has failed for long. Reading a
damaged file that was not checked raises `DamagedFileError`."""


@dataclass(frozen=True)
class DamagedFile:
    """A damaged file. Its rows have sequences from `first` to `last`."""

    tag: str
    name: str
    first: int
    last: int
    why: str


def recover_journal(storage: Storage, tag: str) -> None:
    """Move a truncated newest commit and truncated checkpoints aside, so that the table can be opened.

    Raises `DeltaError` if the table can't be opened after that."""
    try:
        DeltaTable(storage.uri(tag), storage_options=storage.options)
    except TableNotFoundError:
        return
    except DeltaError as error:
        found = storage.files.get_file_info(fs.FileSelector(f"{storage.root}/{tag}/{LOG}"))
        names = sorted(info.base_name for info in found)
        truncated = [n for n in names if n.endswith(".parquet") and _is_damaged(storage, tag, n)]
        commits = [n for n in names if n.endswith(".json") and n.removesuffix(".json").isdigit()]
        if commits and _is_truncated(storage, tag, commits[-1]):
            truncated.append(commits[-1])
        if not truncated:
            raise
        # `_last_checkpoint` is a hint only: without it, delta-rs lists the journal.
        for name in (*truncated, "_last_checkpoint"):
            aside = storage.set_aside(tag, f"{LOG}/{name}")
            log.error("damaged journal file set aside", file=aside, why=str(error).splitlines()[0])
        DeltaTable(storage.uri(tag), storage_options=storage.options)


def _is_damaged(storage: Storage, tag: str, checkpoint: str) -> bool:
    try:
        storage.footer(tag, f"{LOG}/{checkpoint}")
    except DamagedFileError:
        return True
    return False


def _is_truncated(storage: Storage, tag: str, commit: str) -> bool:
    try:
        read_commit(storage, tag, int(commit.removesuffix(".json")))
    except ValueError:
        return True
    return False


def find_damaged_files(table: EventTable) -> list[DamagedFile]:
    """Return the files of the newest version that are missing or whose size is not the one in their commit.

    Raises `LakeError`."""
    files = table.files()
    if files is None:
        return []
    newest = np.argsort(files.changed)[::-1][:_MAX_CHECKED].tolist()
    if len(newest) == len(files.names):
        sizes = table.storage.sizes(table.tag)
    elif table.storage.needs_sync:
        sizes = table.storage.sizes(table.tag, [files.names[i] for i in newest])
    else:
        return []  # object storage holds an object completely or not at all, and listing so many takes minutes
    damaged = []
    for i in newest:
        name, size = files.names[i], int(files.sizes[i])
        if sizes.get(name) != size:
            why = f"{sizes[name]} bytes instead of {size}" if name in sizes else "it is missing"
            damaged.append(DamagedFile(table.tag, name, int(files.first[i]), int(files.last[i]), why))
    return damaged
