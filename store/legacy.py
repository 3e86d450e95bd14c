"""Reads and imports stores from before Delta Lake: Parquet files in the same folders, without a journal.

A file's name is `<stream>-<first sequence>-<last sequence>-<at>[-c<level>].parquet`. A file of level 1 or more was
merged from others and lists them in its footer; a reader must not read those as well. When a store starts, it adds the
files to Delta tables in place, without copying them. Before that, readers find the files by `file_names`.
"""

from __future__ import annotations

import json
import re

from deltalake.exceptions import CommitFailedError

from pipeline.config import StoreConfig
from pipeline.telemetry.logs import get_logger
from store.commits import add_action_of_file, create_table
from store.recovery import DamagedFile
from store.storage import DamagedFileError, Storage
from store.table import EventTable

log = get_logger("store.legacy")

REPLACES = "journeywork.replaces"
"""Footer key under which a merged file lists, as JSON, the names of the files that it replaces."""
_NAME = re.compile(r"[A-Z]+-(?P<first>\d+)-(?P<last>\d+)-(?P<at>[0-9a-f]+)(?:-c(?P<level>\d+))?\.parquet")


def file_names(storage: Storage, tag: str) -> list[str]:
    """Return the files that hold a tag's events, without those that a merged file replaces, sorted.

    Raises `DamagedFileError`."""
    while True:
        try:
            return _current_files(storage, tag)[0]
        except FileNotFoundError:
            continue  # a store of the older version merged and deleted the file after it was listed


def _current_files(
    storage: Storage, tag: str, broken: dict[str, DamagedFileError] | None = None
) -> tuple[list[str], dict[str, int]]:
    """Return the files that no merged file replaces, and the sizes of all files.

    Damaged merged files are collected in `broken`; without it, the first one is raised."""
    sizes = {name: size for name, size in storage.sizes(tag).items() if _NAME.fullmatch(name)}
    replaced: set[str] = set()
    for name in sizes:
        match = _NAME.fullmatch(name)
        if match and match["level"]:
            try:
                metadata = storage.footer(tag, name).metadata or {}
                replaced.update(json.loads(metadata.get(REPLACES.encode(), b"[]")))
            except DamagedFileError as error:
                if broken is None:
                    raise
                broken[name] = (
                    error  # its list can't be read, so the files that it replaces are used if they exist
                )
    return sorted(name for name in sizes if name not in replaced), sizes


def import_files(table: EventTable, config: StoreConfig) -> list[DamagedFile]:
    """Create a tag's Delta table from the files of an older store, in one commit. Return the damaged files, which are
    not in the table.

    Does nothing if the table exists or there are no files. Raises `LakeError`."""
    storage, tag = table.storage, table.tag
    if table.snapshot() is not None:
        return []
    broken: dict[str, DamagedFileError] = {}
    current, sizes = _current_files(storage, tag, broken)
    actions, last = [], 0
    for name in current:
        try:
            action, highest = add_action_of_file(storage, tag, name, sizes[name])
        except DamagedFileError as error:
            broken[name] = error
        else:
            actions.append(action)
            last = max(last, highest)
    if not current:
        return []
    try:
        create_table(storage, tag, actions, last, config)
    except CommitFailedError:
        return []  # another process created the table first
    table.snapshot()
    table.make_durable()
    log.info("files of an older version imported", tag=tag, files=len(actions), damaged=len(broken))
    return [_damaged(tag, name, error) for name, error in broken.items()]


def _damaged(tag: str, name: str, error: DamagedFileError) -> DamagedFile:
    match = _NAME.fullmatch(name)
    assert match is not None
    return DamagedFile(tag, name, int(match["first"]), int(match["last"]), str(error))
