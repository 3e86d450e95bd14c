"""What a power cut or a failing disk did to a table, found when the store starts.

delta-rs syncs nothing, so the end of a journal that was never acknowledged may be cut. A commit that was cut is moved
aside: its events come again from the log. A damaged file is reported, and its events are read from the log again
(`store.repair`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from pyarrow import fs

from pipeline.telemetry.logs import get_logger
from store.commits import journal_of
from store.storage import LOG, DamagedFileError, Storage
from store.table import EventTable

log = get_logger("store.healing")

_CHECKED = 20_000
"""So many of the newest files are checked. A table of more is not kept merged; readers name a damaged file too."""


@dataclass(frozen=True)
class Damaged:
    """A damaged file and the sequences that it held at most."""

    tag: str
    name: str
    first: int
    last: int
    why: str


def mend_journal(storage: Storage, tag: str) -> None:
    """Move a cut commit and a cut checkpoint at the journal's end aside. Raises `DeltaError` where the table can't be
    opened after that."""
    try:
        DeltaTable(storage.uri(tag), storage_options=storage.options)
    except TableNotFoundError:
        return
    except DeltaError as error:
        found = storage.files.get_file_info(fs.FileSelector(f"{storage.root}/{tag}/{LOG}"))
        names = sorted(info.base_name for info in found)
        cut = [n for n in names if n.endswith(".parquet") and _is_damaged(storage, tag, n)]
        commits = [n for n in names if n.endswith(".json") and n.removesuffix(".json").isdigit()]
        if commits and _is_cut(storage, tag, commits[-1]):
            cut.append(commits[-1])
        if not cut:
            raise
        for name in (*cut, "_last_checkpoint"):  # a hint only: without it the journal is listed
            aside = storage.set_aside(tag, f"{LOG}/{name}")
            log.error("damaged journal file set aside", file=aside, why=str(error).splitlines()[0])
        DeltaTable(storage.uri(tag), storage_options=storage.options)


def _is_damaged(storage: Storage, tag: str, checkpoint: str) -> bool:
    try:
        storage.footer(tag, f"{LOG}/{checkpoint}")
    except DamagedFileError:
        return True
    return False


def _is_cut(storage: Storage, tag: str, commit: str) -> bool:
    try:
        journal_of(storage, tag, int(commit.removesuffix(".json")))
    except ValueError:
        return True
    return False


def damage(table: EventTable) -> list[Damaged]:
    """The files of the newest version that are missing or have not the size that their commit says. Raises
    `LakeError`."""
    files = table.files()
    if files is None:
        return []
    newest = np.argsort(files.changed)[::-1][:_CHECKED].tolist()
    if len(newest) == len(files.names):
        sizes = table.storage.sizes(table.tag)
    elif table.storage.needs_sync:
        sizes = table.storage.sizes(table.tag, [files.names[i] for i in newest])
    else:
        return []  # an object is whole or not there, and to list so many takes minutes
    damaged = []
    for i in newest:
        name, size = files.names[i], int(files.sizes[i])
        if sizes.get(name) != size:
            why = f"{sizes[name]} bytes instead of {size}" if name in sizes else "it is missing"
            damaged.append(Damaged(table.tag, name, int(files.first[i]), int(files.last[i]), why))
    return damaged
