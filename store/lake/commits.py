"""Builds and reads commits of a Delta table: actions, transaction ids, table properties, the journal.

The journal is Delta's transaction log: one JSON file per commit in the folder `_delta_log`, and checkpoints. delta-rs
never calls fsync, so a power cut can truncate the newest commits. A truncated commit was never acknowledged:
`recover_journal` moves it aside when the store starts, and the log delivers its events again.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from pipeline import streams
from pipeline.config import StoreConfig
from pipeline.telemetry.logs import get_logger
from store.lake import columns
from store.lake.storage import LOG, DamagedFileError, Storage

logger = get_logger("store.lake.commits")

NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
"""Switches off the checkpoints that delta-rs makes after a commit. `store.lake.maintenance` makes them, because it also
calls fsync."""

_EPOCH = datetime(1970, 1, 1)
_JOURNAL_KEPT = "interval 1 hours"
"""How long commits are kept that a checkpoint covers."""


def transaction_id(tag: str) -> str:
    """Return the application id under which a tag's events are committed: `<consumer>/0`."""
    return f"store-{streams.stream_of_subject(tag).lower()}/0"


def file_name(tag: str, first: int, last: int) -> str:
    """Return a new unique name for a file that holds sequences from `first` to `last`. Only people read the sequences
    in it."""
    return f"{streams.stream_of_subject(tag)}-{first:012d}-{last:012d}-{uuid.uuid4().hex[:12]}.parquet"


def write_rows(storage: Storage, tag: str, rows: pa.Table) -> AddAction:
    """Write a file of these rows, durably. Returns the action that adds it to its table. Raises `OSError`."""
    seqs, ats = rows["log_seq"].to_numpy(), rows["log_at"].cast(pa.int64()).to_numpy()
    first, last = int(seqs.min()), int(seqs.max())
    name = file_name(tag, first, last)
    size = storage.write(tag, name, [rows])
    return add_action(name, size, rows.num_rows, (first, last), (ats.min(), ats.max()))


def add_action(
    name: str, size: int, rows: int, seqs: tuple[int, int], ats: tuple[int, int], *, merged: bool = False
) -> AddAction:
    """Return the action that adds a file of `rows` rows and `size` bytes.

    `seqs`, `ats`: lowest and highest sequence and stream time (microseconds) in the file. `merged`: its rows were in
    other files of the table."""
    low, high = ({"log_seq": int(s), "log_at": _iso_time(int(at))} for s, at in zip(seqs, ats, strict=True))
    stats = {"numRecords": rows, "minValues": low, "maxValues": high, "nullCount": {"log_seq": 0, "log_at": 0}}
    return AddAction(name, size, {}, int(time.time() * 1000), not merged, json.dumps(stats))


def remove_action(name: str, *, merged: bool = False) -> RemoveAction:
    """Return the action that removes a file from the table. `vacuum` deletes the file later. `merged`: another file
    holds its rows."""
    return RemoveAction(name, not merged, int(time.time() * 1000))


def create_table(storage: Storage, tag: str, actions: Iterable[AddAction], last: int, config: StoreConfig) -> None:
    """Create a table and add files to it, in one commit. `last`: the highest sequence in the files.

    Raises `CommitFailedError` if another process has created the table."""
    schema = Schema.from_arrow(columns.arrow_schema(tag))
    try:
        create_table_with_add_actions(
            storage.uri(tag),
            schema,
            list(actions),
            name=tag,
            configuration=table_properties(config),
            storage_options=storage.options,
            # delta-rs would repeat a refused commit as the next version: a second writer would create the table too.
            commit_properties=CommitProperties(
                app_transactions=[Transaction(transaction_id(tag), last)], max_commit_retries=0
            ),
            post_commithook_properties=NO_HOOKS,
        )
    except DeltaError as error:
        if "already exists" in str(error):
            raise CommitFailedError(str(error)) from error
        raise


def table_properties(config: StoreConfig) -> dict[str, str]:
    """Return the Delta properties of a table: how long deleted files and old commits are kept."""
    grace_s = max(0, int(config.compact_grace_s))
    return {
        "delta.deletedFileRetentionDuration": f"interval {grace_s} seconds",
        "delta.logRetentionDuration": _JOURNAL_KEPT,
    }


def read_commit(storage: Storage, tag: str, version: int) -> list[dict[str, Any]]:
    """Return the actions of a commit; none if the commit was cleaned up. Raises `ValueError` if its file is
    truncated."""
    try:
        with storage.files.open_input_file(storage.key(tag, f"{LOG}/{version:020d}.json")) as file:
            return [json.loads(line) for line in file.read().splitlines() if line.strip()]
    except FileNotFoundError:
        return []


def last_checkpoint(storage: Storage, tag: str) -> int:
    """Return the version of the newest checkpoint; -1 if there is none."""
    try:
        with storage.files.open_input_file(storage.key(tag, f"{LOG}/_last_checkpoint")) as file:
            return int(json.loads(file.read())["version"])
    except (FileNotFoundError, ValueError, KeyError):
        return -1


def _iso_time(at: int) -> str:
    """Return a time in microseconds since the epoch in ISO 8601, as Delta's statistics have it."""
    return (_EPOCH + timedelta(microseconds=at)).isoformat(timespec="microseconds")


def recover_journal(storage: Storage, tag: str) -> None:
    """Move a truncated newest commit and truncated checkpoints aside, so that the table can be opened.

    Raises `DeltaError` if the table can't be opened after that."""
    try:
        DeltaTable(storage.uri(tag), storage_options=storage.options)
    except TableNotFoundError:
        return
    except DeltaError as error:
        names = storage.names(f"{tag}/{LOG}")
        checkpoints = [n for n in names if n.endswith(".parquet")]
        commits = [n for n in names if n.endswith(".json") and n.removesuffix(".json").isdigit()]
        truncated = [n for n in (*checkpoints, *commits[-1:]) if _is_truncated(storage, tag, n)]
        if not truncated:
            raise
        # `_last_checkpoint` is a hint only: without it, delta-rs lists the journal.
        for name in (*truncated, "_last_checkpoint"):
            aside = storage.set_aside(tag, f"{LOG}/{name}")
            logger.error("damaged journal file set aside", file=aside, why=str(error).splitlines()[0])
        DeltaTable(storage.uri(tag), storage_options=storage.options)


def _is_truncated(storage: Storage, tag: str, name: str) -> bool:
    """Return whether a checkpoint or a commit can't be read."""
    try:
        if name.endswith(".parquet"):
            storage.read(tag, f"{LOG}/{name}", [])
        else:
            read_commit(storage, tag, int(name.removesuffix(".json")))
    except (DamagedFileError, ValueError):
        return True
    return False
