"""Finds what a power cut did to a table's journal (Delta's transaction log) when the store starts.

delta-rs never calls fsync, so a power cut can truncate the newest commits. A truncated commit was never acknowledged:
it is moved aside, and the log delivers its events again.
"""

from __future__ import annotations

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from pyarrow import fs

from pipeline.telemetry.logs import get_logger
from store.lake.commits import read_commit
from store.lake.storage import LOG, DamagedFileError, Storage

logger = get_logger("store.lake.recovery")


def recover_journal(storage: Storage, tag: str) -> None:
    """Move a truncated newest commit and truncated checkpoints aside, so that the table can be opened.

    Raises `DeltaError` if the table can't be opened after that."""
    try:
        DeltaTable(storage.uri(tag), storage_options=storage.options)
    except TableNotFoundError:
        return
    except DeltaError as error:
        journal = storage.files.get_file_info(fs.FileSelector(f"{storage.root}/{tag}/{LOG}"))
        names = sorted(info.base_name for info in journal)
        truncated = [n for n in names if n.endswith(".parquet") and _is_damaged(storage, tag, n)]
        commits = [n for n in names if n.endswith(".json") and n.removesuffix(".json").isdigit()]
        if commits and _is_truncated(storage, tag, commits[-1]):
            truncated.append(commits[-1])
        if not truncated:
            raise
        # `_last_checkpoint` is a hint only: without it, delta-rs lists the journal.
        for name in (*truncated, "_last_checkpoint"):
            aside = storage.set_aside(tag, f"{LOG}/{name}")
            logger.error("damaged journal file set aside", file=aside, why=str(error).splitlines()[0])
        DeltaTable(storage.uri(tag), storage_options=storage.options)


def _is_damaged(storage: Storage, tag: str, checkpoint: str) -> bool:
    try:
        storage.read(tag, f"{LOG}/{checkpoint}", [])
    except DamagedFileError:
        return True
    return False


def _is_truncated(storage: Storage, tag: str, commit: str) -> bool:
    try:
        read_commit(storage, tag, int(commit.removesuffix(".json")))
    except ValueError:
        return True
    return False
