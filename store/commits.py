"""The parts of a commit of a Delta table: its actions, its transaction, the table's properties, and what its journal
says."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, PostCommitHookProperties, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from pipeline import streams
from pipeline.config import StoreConfig
from store import columns
from store.place import LOG, Place

NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
"""Checkpoints are made by `store.upkeep`, which syncs them."""

_EPOCH = datetime(1970, 1, 1)
_LOG_KEPT = "interval 1 hours"


def transaction(tag: str) -> str:
    """The application id under which a tag's events are committed: its consumer and partition."""
    return f"store-{streams.stream_of_subject(tag).lower()}/0"


def file_name(tag: str, table: pa.Table) -> str:
    """A name that no other file has; its sequences are for people."""
    seqs = table["log_seq"].to_numpy()
    return name_of(tag, int(seqs.min()), int(seqs.max()))


def name_of(tag: str, first: int, last: int) -> str:
    """A name that no other file has, for a file of these sequences."""
    return f"{streams.stream_of_subject(tag)}-{first:012d}-{last:012d}-{uuid.uuid4().hex[:12]}.parquet"


def add_action(name: str, size: int, table: pa.Table) -> AddAction:
    """The action that adds a file with these rows."""
    seqs, ats = table["log_seq"].to_numpy(), table["log_at"].cast(pa.int64()).to_numpy()
    return added(name, size, table.num_rows, (seqs.min(), seqs.max()), (ats.min(), ats.max()))


def added(
    name: str, size: int, rows: int, seqs: tuple[int, int], ats: tuple[int, int], *, merged: bool = False
) -> AddAction:
    """The action that adds a file, with the lowest and highest sequence and stream time (microseconds) in it."""
    low, high = ({"log_seq": int(s), "log_at": _time(int(at))} for s, at in zip(seqs, ats, strict=True))
    stats = {
        "numRecords": rows,
        "minValues": low,
        "maxValues": high,
        "nullCount": {"log_seq": 0, "log_at": 0},
    }
    return AddAction(name, size, {}, int(time.time() * 1000), not merged, json.dumps(stats))


def adopted(place: Place, tag: str, name: str, size: int, *, merged: bool = False) -> tuple[AddAction, int]:
    """The action that adds an existing file, by its footer, and the highest sequence in it. `merged`: its rows were in
    other files. Raises `DamagedFileError`."""
    footer = place.footer(tag, name)
    paths = [footer.row_group(0).column(i).path_in_schema for i in range(footer.num_columns)]
    seq, at = (
        [footer.row_group(i).column(paths.index(column)).statistics for i in range(footer.num_row_groups)]
        for column in ("log_seq", "log_at")
    )
    seqs = min(s.min for s in seq), max(s.max for s in seq)
    ats = min(_micros(s.min) for s in at), max(_micros(s.max) for s in at)
    return added(name, size, footer.num_rows, seqs, ats, merged=merged), seqs[1]


def removed(name: str, *, merged: bool = False) -> RemoveAction:
    """The action that removes a file; `vacuum` deletes it later. `merged`: its rows stay, in another file."""
    return RemoveAction(name, not merged, int(time.time() * 1000))


def create(place: Place, tag: str, actions: Iterable[AddAction], last: int, config: StoreConfig) -> None:
    """Create a table that holds files, in one commit. Raises `CommitFailedError` if another process was first."""
    schema = Schema.from_arrow(columns.arrow_schema(tag))
    try:
        create_table_with_add_actions(
            place.uri(tag), schema, list(actions), name=tag, configuration=settings(config),
            storage_options=place.options,
            commit_properties=CommitProperties(app_transactions=[Transaction(transaction(tag), last)]),
            post_commithook_properties=NO_HOOKS,
        )  # fmt: skip
    except DeltaError as error:
        if "already exists" in str(error):
            raise CommitFailedError(str(error)) from error
        raise


def settings(config: StoreConfig) -> dict[str, str]:
    """The properties of a table."""
    grace_s = max(0, int(config.compact_grace_s))
    return {
        "delta.deletedFileRetentionDuration": f"interval {grace_s} seconds",
        "delta.logRetentionDuration": _LOG_KEPT,
    }


def journal_of(place: Place, tag: str, version: int) -> list[dict[str, Any]]:
    """The actions of a commit; none where it was cleaned up. Raises `ValueError` where it was cut."""
    try:
        with place.files.open_input_file(place.key(tag, f"{LOG}/{version:020d}.json")) as file:
            return [json.loads(line) for line in file.read().splitlines() if line.strip()]
    except FileNotFoundError:
        return []


def last_checkpoint(place: Place, tag: str) -> int:
    """The version of the newest checkpoint; -1 where there is none."""
    try:
        with place.files.open_input_file(place.key(tag, f"{LOG}/_last_checkpoint")) as file:
            return int(json.loads(file.read())["version"])
    except (FileNotFoundError, ValueError, KeyError):
        return -1


def _time(at: int) -> str:
    return (_EPOCH + timedelta(microseconds=at)).isoformat(timespec="microseconds")


def _micros(value: datetime) -> int:
    return int(value.replace(tzinfo=UTC, microsecond=0).timestamp()) * 1_000_000 + value.microsecond
