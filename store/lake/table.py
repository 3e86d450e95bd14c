"""The Delta table of one event tag.

An event is identified by its stream sequence and stream time together: a stream that was deleted and made again, or a
log that lost its end in a power cut, uses the same sequences again.

A table records a version number for each application that writes it (Delta's `txn` action). Each commit adds a file and
sets the number of the application `<consumer>/0` to the highest sequence that was ever committed, so data and position
move together. delta-rs refuses a commit if another one has set that number since its snapshot. Any number of processes
may therefore append the same deliveries: a process whose commit is refused, or whose commit's answer was lost, reads
the newest snapshot, leaves out what files hold by now, and commits the rest.

The journal of a commit is on the disk, with the files that it names, before `append` returns.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from pipeline import crash
from pipeline.config import StoreConfig
from store.lake import columns
from store.lake.commits import NO_HOOKS, create_table, last_checkpoint, read_commit, transaction_id, write_rows
from store.lake.storage import LOG, DamagedFileError, Storage

Ints = npt.NDArray[np.int64]
Result = TypeVar("Result")

LAKE_ERRORS = (OSError, DeltaError)
"""The errors of a read or a commit when the storage fails, as `except` takes them."""

_REMOVAL_TRANSACTION = "store-upkeep"
"""Application id of the transaction that every commit sets that removes files. Without it, delta-rs 1.6 accepts two
commits that remove the same files, which doubles the rows of a merge. It refuses the second one if both set the same
transaction."""

_MAX_REFUSALS = 20
"""Number of refusals of a commit, while no other process commits anything, after which `append` raises."""
_STATISTICS_US = 1_000
"""Precision of times in file statistics: delta-rs truncates them to milliseconds."""
_SNAPSHOT_MAX_AGE_S = 600.0
"""A commit against an older snapshot is checked again: commits since that snapshot may have been cleaned up, so that
delta-rs did not compare with them. Well below the time for which the journal is kept (`store.lake.commits`)."""


@dataclass(frozen=True)
class Files:
    """The files of a table at one version. Each field has one item per file."""

    names: list[str]
    sizes: Ints
    rows: Ints
    first: Ints
    """Lowest sequence in the file."""
    last: Ints
    """Highest sequence in the file."""
    oldest: Ints
    """Lowest stream time in the file in microseconds; may be up to a millisecond too low."""
    newest: Ints
    """Highest stream time in the file in microseconds; may be up to a millisecond too low."""

    @classmethod
    def from_delta(cls, delta: DeltaTable) -> Files:
        """Return the files of a snapshot. A file without statistics may hold any sequence and any time."""
        # Neither `pa.table` nor `fill_null` nor `to_numpy`: they import pandas, which takes longer than most queries.
        added = pa.RecordBatchReader.from_stream(delta.get_add_actions(flatten=True)).read_all()

        def ints(name: str, missing: int) -> Ints:
            if name not in added.column_names:
                return np.full(added.num_rows, missing, dtype=np.int64)
            values = added[name].cast(pa.int64()).to_pylist()
            return np.array([missing if value is None else value for value in values], dtype=np.int64)

        lowest, highest = np.iinfo(np.int64).min // 2, np.iinfo(np.int64).max // 2
        return cls(
            added["path"].to_pylist(),
            ints("size_bytes", 0),
            ints("num_records", 0),
            ints("min.log_seq", lowest),
            ints("max.log_seq", highest),
            ints("min.log_at", lowest),
            ints("max.log_at", highest),
        )


_NO_FILES = Files([], *[np.zeros(0, dtype=np.int64)] * 6)


class EventTable:
    """The table of one event tag. Several threads may call its methods: one at a time runs.

    `commit` is checked against the last snapshot, whichever thread read it. What commits removals of files that it
    found in a snapshot therefore needs a table of its own, as maintenance and erasure have."""

    def __init__(self, storage: Storage, tag: str, config: StoreConfig | None = None) -> None:
        self.storage, self.tag = storage, tag
        self._config = config or StoreConfig()
        self._lock = threading.RLock()
        self._delta: DeltaTable | None = None
        self._files: Files | None = None
        self._files_version = -1
        """Version of the table that `_files` were read from."""
        self._read_at = 0.0
        """When `_delta` was last updated, in seconds since the epoch."""
        self._durable = -1
        """Newest version that is known to survive a power cut; -1 if none is known."""
        self._identities = functools.lru_cache(maxsize=8)(self._read_identities)
        """Sequences and stream times of a file's events, by the file's name."""

    def snapshot(self) -> DeltaTable | None:
        """Read and return the table's newest version; `None` if nothing was ever committed. Raises one of
        `LAKE_ERRORS`."""
        with self._lock:
            self._delta = self._read_newest()
            self._read_at = time.time()
            return self._delta

    def _version(self) -> int:
        """Return the version of the last snapshot; -1 if nothing was ever committed."""
        return -1 if self._delta is None else self._delta.version()

    def _read_newest(self) -> DeltaTable | None:
        """Return the table at its newest version, read from the last snapshot on if possible; `None` without a
        commit."""
        if self._delta is not None:
            try:
                self._delta.update_incremental()
                return self._delta
            except DeltaError:
                pass  # the next commits were cleaned up and are in a checkpoint: read the table from the start
        try:
            return DeltaTable(self.storage.uri(self.tag), storage_options=self.storage.options)
        except TableNotFoundError:
            return None

    def files(self) -> Files:
        """Return the files of the newest version. Raises one of `LAKE_ERRORS`."""
        with self._lock:
            self.snapshot()
            return self._files_of_snapshot()

    def _files_of_snapshot(self) -> Files:
        """Return the files of the last snapshot."""
        # Maintenance updates `_delta` too, so it may be newer than `_files` though `snapshot` found nothing new.
        if self._files is None or self._files_version != self._version():
            self._files = _NO_FILES if self._delta is None else Files.from_delta(self._delta)
            self._files_version = self._version()
        return self._files

    def schema(self) -> pa.Schema:
        """Return the schema of the last snapshot. One must have been read."""
        with self._lock:
            assert self._delta is not None
            return pa.schema(self._delta.schema())

    # -- writing ---------------------------------------------------------------------------------------------------

    def append(self, table: pa.Table) -> int:
        """Commit those rows of `table` that no file holds, durably. Return their number.

        Raises one of `LAKE_ERRORS`. Even then the rows may have been committed; the call can be repeated."""
        with self._lock:
            added: AddAction | None = None
            written, version, refused = 0, -1, 0
            while True:
                fresh = self.missing_rows(table)
                if not fresh.num_rows:
                    self.make_durable()
                    return written
                if added is None or written != fresh.num_rows:
                    added, written = write_rows(self.storage, self.tag, fresh), fresh.num_rows
                    crash.point("store.before_commit")
                    continue  # writing took time: read the newest snapshot again, so that a conflict is unlikely
                version, before = self._version(), version
                if version != before:
                    # Another process has committed: the refusals were conflicts and no failure.
                    refused = 0
                try:
                    self.commit([added], int(fresh["log_seq"].to_numpy().max()))
                except CommitFailedError:
                    refused += 1
                    if refused == _MAX_REFUSALS:
                        raise
                    continue
                if time.time() - self._read_at < _SNAPSHOT_MAX_AGE_S:
                    return written
                # The process was suspended for so long that its commit may reuse the number of one that was cleaned
                # up. Read the table from the start and see whether the rows are in it.
                self._delta = self._files = None

    def commit(self, actions: Sequence[AddAction | RemoveAction], last: int | None = None) -> None:
        """Commit actions against the last snapshot. Creates the table if it does not exist.

        `last`: the highest sequence of the new rows, to which the tag's transaction is set if that is higher.
        Raises `CommitFailedError` if another process has committed new rows since the snapshot while these actions add
        some, or removed files while these remove some; also if these remove a file that the snapshot does not have."""
        with self._lock:
            read_at = self._read_at
            if self._delta is None:
                added = [a for a in actions if isinstance(a, AddAction)]
                create_table(self.storage, self.tag, added, last or 0, self._config)
            else:
                self._delta.create_write_transaction(
                    list(actions),
                    "append",
                    self._delta.schema(),
                    commit_properties=CommitProperties(app_transactions=self._transactions(self._delta, actions, last)),
                    post_commithook_properties=NO_HOOKS,
                )
            crash.point("store.after_commit")
            self.snapshot()
            self._read_at = read_at  # `append` asks how old the snapshot was that this commit was checked against
            self.make_durable()

    def _transactions(
        self, delta: DeltaTable, actions: Sequence[AddAction | RemoveAction], last: int | None
    ) -> list[Transaction]:
        """Return the transactions that a commit of these actions sets: delta-rs refuses it if another commit has set
        one of them since the snapshot `delta`. New rows, up to sequence `last`, set that of the tag; removals set one
        of their own. Raises `CommitFailedError` if the snapshot lacks a file that is to be removed."""
        transactions = []
        if last is not None:
            app_id = transaction_id(self.tag)
            transactions.append(Transaction(app_id, max(last, delta.transaction_version(app_id) or 0)))
        if removed := {a.path for a in actions if isinstance(a, RemoveAction)}:
            # delta-rs 1.6 accepts such a removal. If the file was merged, its rows would be there twice.
            if gone := removed.difference(self._files_of_snapshot().names):
                raise CommitFailedError(f"{self.tag}: no longer in the table: {', '.join(sorted(gone))}")
            transactions.append(Transaction(_REMOVAL_TRANSACTION, delta.version() + 1))
        return transactions

    def sync(self) -> None:
        """Read the newest snapshot and make it durable. Raises one of `LAKE_ERRORS`."""
        with self._lock:
            self.snapshot()
            self.make_durable()

    def make_durable(self) -> None:
        """Call fsync for all commits up to the last snapshot and the files that they add, including those of other
        processes."""
        with self._lock:
            if self._delta is None or not self.storage.needs_sync:
                return
            version = self._delta.version()
            if self._durable < 0:
                # The commits that a checkpoint covers were synced before it was made.
                self._durable = last_checkpoint(self.storage, self.tag)
            for at in range(self._durable + 1, version + 1):
                journal = f"{LOG}/{at:020d}.json"
                names = [a["add"]["path"] for a in read_commit(self.storage, self.tag, at) if "add" in a]
                self.storage.make_durable(self.tag, [*names, journal])
            self._durable = version

    def add_missing_columns(self) -> None:
        """Add the columns and struct fields that events have today and the table lacks. Raises one of `LAKE_ERRORS`."""
        with self._lock:
            wanted = columns.arrow_schema(self.tag)
            for _ in range(_MAX_REFUSALS):
                delta = self.snapshot()
                if delta is None or covers(pa.schema(delta.schema()), wanted):
                    return
                with contextlib.suppress(CommitFailedError):  # another process may have done it
                    write_deltalake(
                        delta,
                        wanted.empty_table(),
                        mode="append",
                        schema_mode="merge",
                        post_commithook_properties=NO_HOOKS,
                    )
                self._delta = None
                self.sync()
            raise CommitFailedError(f"{self.tag}: {_MAX_REFUSALS} attempts to add the columns of this version")

    # -- rows that files hold ------------------------------------------------------------------------------------------

    def missing_rows(self, table: pa.Table) -> pa.Table:
        """Return the rows of `table` that no file of the newest version holds.

        Raises one of `LAKE_ERRORS`, and `DamagedFileError` if a file of the table is missing or damaged."""
        with self._lock:
            seqs, ats = table["log_seq"].to_numpy(), table["log_at"].cast(pa.int64()).to_numpy()
            stored = self.read_newest_files(lambda: self._are_stored(seqs, ats))
            return table.filter(pa.array(~stored)) if stored.any() else table

    def read_newest_files(self, read: Callable[[], Result]) -> Result:
        """Return what `read` makes of the table's files. It is called again if a file is gone because another process
        has replaced it. Raises `DamagedFileError` if the newest version has a file that is missing."""
        version_with_gap = -1
        while True:
            try:
                return read()
            except FileNotFoundError as error:
                if self._version() == version_with_gap:
                    raise DamagedFileError(str(error.filename or error), "it is missing") from error
                version_with_gap = self._version()
                self._delta = self._files = None

    def _are_stored(self, seqs: Ints, ats: Ints) -> npt.NDArray[np.bool_]:
        """Return for each event whether a file holds it. An event is its stream sequence and its stream time: after a
        power cut, or in a stream that was made again, other events have the same sequences."""
        files, identities = self.files(), set[tuple[int, int]]()
        for index in _files_that_may_hold(files, seqs, ats):
            file_seqs, file_ats = self._identities(files.names[index])
            asked = np.isin(file_seqs, seqs)
            identities.update(zip(file_seqs[asked].tolist(), file_ats[asked].tolist(), strict=True))
        events = zip(seqs.tolist(), ats.tolist(), strict=True)
        return np.fromiter((event in identities for event in events), dtype=bool, count=len(seqs))

    def _read_identities(self, name: str) -> tuple[Ints, Ints]:
        """Return the sequences and the stream times (microseconds) of the events in a file."""
        rows = self.storage.read(self.tag, name, ["log_seq", "log_at"])
        return rows["log_seq"].to_numpy(), rows["log_at"].cast(pa.int64()).to_numpy()


def _files_that_may_hold(files: Files, seqs: Ints, ats: Ints) -> list[int]:
    """Return the indices of the files that have one of `seqs` between their lowest and their highest sequence, and
    whose stream times overlap with `ats`. A new batch has usually none: it is not compared with any file then."""
    if not len(seqs) or not files.names:
        return []
    wanted = np.sort(seqs)
    # Of each file: the lowest wanted sequence that is not below its first one.
    nearest = wanted[np.minimum(np.searchsorted(wanted, files.first), len(wanted) - 1)]
    by_seq = (nearest >= files.first) & (nearest <= files.last)
    by_time = (files.newest + _STATISTICS_US >= ats.min()) & (files.oldest - _STATISTICS_US <= ats.max())
    return [int(index) for index in np.flatnonzero(by_seq & by_time)]


def covers(schema: pa.Schema, required: pa.Schema) -> bool:
    """Return whether `schema` has all columns of `required` and all their struct fields, at any depth."""
    united = pa.unify_schemas([schema, required], promote_options="permissive")
    return bool(united.equals(schema))
