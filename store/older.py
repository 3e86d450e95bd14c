"""Stores from before Delta Lake: Parquet files whose names said what they hold, without a journal.

Their names are `<stream>-<first>-<last>-<at>[-c<level>].parquet`. A file that was merged from others, of level 1 or
more, lists them in its footer; they are not to be read beside it. A store that starts takes the files over where they
are, without copying them. Until then readers read them through `names`.
"""

from __future__ import annotations

import json
import re

from deltalake.exceptions import CommitFailedError

from pipeline.config import StoreConfig
from pipeline.telemetry.logs import get_logger
from store.commits import adopted, create
from store.healing import Damaged
from store.storage import DamagedFileError, Storage
from store.table import EventTable

log = get_logger("store.older")

REPLACES = "journeyman.replaces"
"""Footer key."""
_NAME = re.compile(r"[A-Z]+-(?P<first>\d+)-(?P<last>\d+)-(?P<at>[0-9a-f]+)(?:-c(?P<level>\d+))?\.parquet")


def names(storage: Storage, tag: str) -> list[str]:
    """The files of an older store that hold a tag's events now. Raises `DamagedFileError`."""
    while True:
        try:
            return _live(storage, tag)[0]
        except FileNotFoundError:
            continue  # a store of the older version merged it after it was listed


def _live(
    storage: Storage, tag: str, broken: dict[str, DamagedFileError] | None = None
) -> tuple[list[str], dict[str, int]]:
    """The live files, and the sizes of all. Damaged merged files are collected in `broken` if it is given."""
    sizes = {name: size for name, size in storage.sizes(tag).items() if _NAME.fullmatch(name)}
    replaced: set[str] = set()
    for name in sizes:
        match = _NAME.fullmatch(name)
        if match and match["level"]:
            try:
                replaced.update(
                    json.loads((storage.footer(tag, name).metadata or {}).get(REPLACES.encode(), b"[]"))
                )
            except DamagedFileError as error:
                if broken is None:
                    raise
                broken[name] = (
                    error  # it replaces nothing: the files that it was made of are live if they are there
                )
    return sorted(name for name in sizes if name not in replaced), sizes


def take_over(table: EventTable, config: StoreConfig) -> list[Damaged]:
    """Create a tag's table over the files of an older store, in one commit. Does nothing where the table exists or
    there are no files. Returns the damaged files. Raises `LakeError`."""
    storage, tag = table.storage, table.tag
    if table.snapshot() is not None:
        return []
    broken: dict[str, DamagedFileError] = {}
    live, sizes = _live(storage, tag, broken)
    actions, last = [], 0
    for name in live:
        try:
            action, highest = adopted(storage, tag, name, sizes[name])
        except DamagedFileError as error:
            broken[name] = error
        else:
            actions.append(action)
            last = max(last, highest)
    if not live:
        return []
    try:
        create(storage, tag, actions, last, config)
    except CommitFailedError:
        return []  # another store was first
    table.snapshot()
    table.make_durable()
    log.info("files of an older version taken over", tag=tag, files=len(actions), damaged=len(broken))
    return [_damaged(tag, name, error) for name, error in broken.items()]


def _damaged(tag: str, name: str, error: DamagedFileError) -> Damaged:
    match = _NAME.fullmatch(name)
    assert match is not None
    return Damaged(tag, name, int(match["first"]), int(match["last"]), str(error))
