"""Table maintenance: merges small files, makes Delta checkpoints, deletes unused files with Delta's `vacuum`, and
removes events older than `store.keep_days`.

A merge is one commit, so a reader sees either the small files or the merged one. The small files stay on disk for
`store.compact_grace_s`, for queries that began before the merge. Every process of the store runs maintenance. If two
merge the same files at once, delta-rs refuses the second commit, and that process continues with the next table.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Iterator

import anyio
import anyio.to_thread
import numpy as np
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from pipeline import crash
from pipeline.config import StoreConfig
from pipeline.telemetry.logs import get_logger
from store.lake import columns
from store.lake.commits import NO_HOOKS, add_action, file_name, last_checkpoint, remove_action, table_properties
from store.lake.lake import Lake
from store.lake.storage import LOG, DamagedFileError
from store.lake.table import LAKE_ERRORS, EventTable, Files, covers

logger = get_logger("store.lake.maintenance")

_TIERS = (64, 8, 1)
"""Files are merged to 1/64, then 1/8, then all of `store.compact_bytes`, so that a row is rewritten three times at
most."""
_GROUP_BYTES = 64 * 1024 * 1024
"""Bytes of a row group of a merged file, about."""
_CHECKPOINT_EVERY = 100
"""Commits between two checkpoints."""
_ORPHAN_HOURS = 24
"""Age after which a file that no commit names is taken for one that a dead process left behind."""
_DAY_S = 86_400.0


class Maintenance:
    """Maintains the tables of one lake."""

    def __init__(self, lake: Lake, config: StoreConfig) -> None:
        self._lake, self._config = lake, config
        # Table objects that the writer does not share: a merge takes long, and its commit must be checked against the
        # snapshot that the merge read, not against a newer one that the writer has loaded.
        self._own = functools.cache(lambda tag: EventTable(lake.storage, tag, config))
        self._unvacuumed: dict[str, list[float]] = defaultdict(lambda: [time.monotonic()])
        """By tag, the times at which files were replaced that no vacuum has deleted, by `time.monotonic()`. The first
        round counts as one: a process that has ended may have replaced some."""
        self.damaged: dict[str, str] = {}
        """By tag, the damaged file for which its table is not merged."""
        self._searched: dict[str, float] = {}
        """By tag, when the folder was last searched for files of dead processes, by `time.monotonic()`."""

    async def run(self) -> None:
        """Maintain the tables every `store.compact_s` seconds until cancelled."""
        while True:
            await anyio.sleep(self._config.compact_s)
            # A thread can't be stopped, so a cancellation waits for the end of the round.
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self.once)

    def once(self) -> None:
        """Maintain each table once. A failure is logged, and the next round tries again."""
        for table in self._lake.tables():
            try:
                self._maintain(table)
            except CommitFailedError as error:
                logger.info("another process maintained this table first", tag=table.tag, why=str(error))
            except LAKE_ERRORS as error:
                logger.warning("table not maintained; trying again in the next round", tag=table.tag, why=str(error))

    def _maintain(self, table: EventTable) -> None:
        """Maintain a table, through a table object that the writer does not share. Raises one of `LAKE_ERRORS`."""
        own = self._own(table.tag)
        delta = own.snapshot()
        if delta is None:
            return
        self._set_properties(delta)
        replaced = False
        try:
            replaced = self._merge(own)
            self.damaged.pop(table.tag, None)
        except DamagedFileError as error:
            logger.error("table not merged", tag=table.tag, why=str(error))
            self.damaged[table.tag] = error.path
        if self._config.keep_days > 0:
            replaced |= self._drop_expired(own)
        if replaced:
            self._unvacuumed[table.tag].append(time.monotonic())
        self._vacuum(own, delta)
        self._checkpoint(own, delta)

    def _set_properties(self, delta: DeltaTable) -> None:
        """Set the table's Delta properties to those of the settings, if they differ."""
        wanted = table_properties(self._config)
        if wanted.items() - delta.metadata().configuration.items():
            delta.alter.set_table_properties(wanted, post_commithook_properties=NO_HOOKS)

    def _merge(self, table: EventTable) -> bool:
        """Merge small files with adjacent sequences, and return whether any were merged. Each merge is a commit.

        delta-rs's `optimize` is not used: it drops the writer's transaction, and two of them at once double the rows
        (docs/decisions/store.md)."""
        merged = False
        for tier in _TIERS:
            target = max(1, self._config.compact_bytes // tier)
            while (to_merge := self._files_to_merge(table, target)) is not None:
                # No newer snapshot is read before the commit, so that delta-rs refuses it if these files were removed.
                files, inputs = to_merge
                names = [files.names[i] for i in inputs]
                seqs = int(files.first[inputs].min()), int(files.last[inputs].max())
                ats = int(files.oldest[inputs].min()), int(files.newest[inputs].max())
                new = file_name(table.tag, *seqs)
                size = table.storage.write(table.tag, new, _row_groups(table, names))
                action = add_action(new, size, int(files.rows[inputs].sum()), seqs, ats, merged=True)
                table.commit([action, *(remove_action(name, merged=True) for name in names)])
                crash.point("store.compacted")
                logger.info("compacted", tag=table.tag, files=len(names), into=new)
                merged = True
        return merged

    def _files_to_merge(self, table: EventTable, target: int) -> tuple[Files, list[int]] | None:
        """Return the files of the newest snapshot and the indices of the first small ones to merge; `None` if there are
        too few. Returns `None` too if a newer version of the store has added columns, which a merge would drop."""
        files = table.files()
        if not covers(columns.arrow_schema(table.tag), table.schema()):
            return None
        run: list[int] = []
        size = 0
        for i in np.argsort(files.first, kind="stable").tolist():
            if files.sizes[i] * 2 >= target:
                continue
            run.append(i)
            size += int(files.sizes[i])
            if size >= target:
                if len(run) >= self._config.compact_files:
                    return files, run
                run, size = [], 0
        return (files, run) if len(run) >= self._config.compact_files else None

    def _drop_expired(self, table: EventTable) -> bool:
        """Take files out of the table whose newest event is older than `store.keep_days`; `_vacuum` deletes them later.
        A file with one younger event stays whole, and so does one without statistics. Returns whether any were."""
        limit_us = int((time.time() - self._config.keep_days * _DAY_S) * 1e6)
        files = table.files()
        names = [files.names[i] for i in np.flatnonzero(files.newest < limit_us)]
        if not names:
            return False
        table.commit([remove_action(name) for name in names])
        logger.info("files removed from the table", tag=table.tag, files=names, keep_days=self._config.keep_days)
        return True

    def _vacuum(self, table: EventTable, delta: DeltaTable) -> None:
        """Delete files that were replaced `store.compact_grace_s` ago, and once a day files that no commit names."""
        now, tag = time.monotonic(), table.tag
        if now - self._searched.setdefault(tag, now - _DAY_S) >= _DAY_S:
            delta.update_incremental()
            delta.vacuum(
                _ORPHAN_HOURS,
                dry_run=False,
                enforce_retention_duration=False,
                full=True,
                post_commithook_properties=NO_HOOKS,
            )
            self._searched[tag] = now
        waiting = [at for at in self._unvacuumed[tag] if now - at < self._config.compact_grace_s]
        if len(waiting) < len(self._unvacuumed[tag]):
            delta.update_incremental()
            delta.vacuum(dry_run=False, enforce_retention_duration=False, post_commithook_properties=NO_HOOKS)
            self._unvacuumed[tag] = waiting
        table.sync()

    def _checkpoint(self, table: EventTable, delta: DeltaTable) -> None:
        """Make a Delta checkpoint after every `_CHECKPOINT_EVERY` commits, durably, and delete the journal that it
        covers."""
        delta.update_incremental()
        if delta.version() - max(0, last_checkpoint(table.storage, table.tag)) < _CHECKPOINT_EVERY:
            return
        table.sync()
        delta.create_checkpoint()
        crash.point("store.checkpointed")
        if table.storage.needs_sync:
            names = table.storage.names(f"{table.tag}/{LOG}")
            table.storage.make_durable(table.tag, [f"{LOG}/{name}" for name in names if "checkpoint" in name])
        delta.cleanup_metadata()


def _row_groups(table: EventTable, names: list[str]) -> Iterator[pa.Table]:
    """Yield all rows of the files, in tables of about 64 MiB to bound memory. Columns that a file lacks are null."""
    empty = columns.arrow_schema(table.tag).empty_table()
    waiting, size = [empty], 0
    for name in names:
        rows = table.storage.read(table.tag, name)
        waiting.append(rows)
        size += rows.nbytes
        if size >= _GROUP_BYTES or name == names[-1]:
            yield pa.concat_tables(waiting, promote_options="permissive")
            waiting, size = [empty], 0
