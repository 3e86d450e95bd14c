"""Keeps the tables small: small files are merged, Delta's `vacuum` deletes what nothing reads, its checkpoints shorten
the journal, and `store.keep_days` removes old events.

A merge is one commit: a reader sees the files before it or after it. The merged files stay for queries that began
before, for `store.compact_grace_s`. Every process of the store does this; of two that merge the same files at once, one
is refused and goes on.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import anyio
import anyio.to_thread
import numpy as np
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from pyarrow import fs

from pipeline import crash
from pipeline.config import StoreConfig
from pipeline.telemetry.logs import get_logger
from store import columns
from store.commits import NO_HOOKS, adopted, last_checkpoint, name_of, removed, settings
from store.lake import Lake
from store.place import LOG, Place
from store.table import EventTable, Files, LakeError, covers

log = get_logger("store.upkeep")

_TIERS = (64, 8, 1)
"""Files are merged in tiers, to an eighth of the next tier's size, so that a row is merged three times at most."""
_GROUP_BYTES = 64 * 1024 * 1024
_CHECKPOINT_EVERY = 100
_ORPHAN_HOURS = 24
"""A file that no commit names is a dead process's after this time."""
_DAY_S = 86_400.0


class Upkeep:
    """Keeps the tables of one lake."""

    def __init__(self, lake: Lake, config: StoreConfig) -> None:
        self._lake, self._config = lake, config
        # Handles of its own: a merge takes long and is to be refused if its snapshot has changed.
        self._own = functools.cache(lambda tag: EventTable(lake.place, tag, config))
        self._unvacuumed: dict[str, float] = {}
        """When a tag's files were replaced first since its last vacuum, `time.monotonic()`."""
        self._swept: dict[str, float] = {}
        """When a tag's folder was searched for files of dead processes."""

    async def run(self) -> None:
        """Keep the tables every `store.compact_s` seconds until cancelled."""
        while True:
            await anyio.sleep(self._config.compact_s)
            # A thread can't be stopped: a cancellation waits for the end of the round.
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self.once)

    def once(self) -> None:
        """One round over every table. What fails is told, and tried again in the next round."""
        for table in self._lake.tables():
            try:
                self._keep(table)
            except CommitFailedError as error:
                log.info("another store was first", tag=table.tag, why=str(error))
            except LakeError as error:
                log.warning("table not kept", tag=table.tag, why=str(error))

    def _keep(self, table: EventTable) -> None:
        own = self._own(table.tag)
        delta = own.snapshot()
        if delta is None:
            return
        self._configure(delta)
        replaced = self._merge(own)
        if self._config.keep_days > 0:
            replaced |= self._remove_old(own)
        if replaced:
            self._unvacuumed.setdefault(table.tag, time.monotonic())
        self._vacuum(own, delta)
        self._checkpoint(own, delta)

    def _configure(self, delta: DeltaTable) -> None:
        wanted = settings(self._config)
        if wanted.items() - delta.metadata().configuration.items():
            delta.alter.set_table_properties(wanted, post_commithook_properties=NO_HOOKS)

    def _merge(self, table: EventTable) -> bool:
        """Merge runs of small files with adjacent sequences. Each merge is a commit. delta-rs's `optimize` does not do:
        it drops the transaction, and two of them double the rows ([0053](docs/decisions/0053-delta-lake.md))."""
        merged = False
        for tier in _TIERS:
            target = max(1, self._config.compact_bytes // tier)
            while (due := self._due(table, target)) is not None:
                # No newer snapshot is read before the commit, which is to be refused if these files are gone.
                files, inputs = due
                names = [files.names[i] for i in inputs]
                new = name_of(table.tag, int(files.first[inputs].min()), int(files.last[inputs].max()))
                size = table.place.write(table.tag, new, _rows(table, names))
                action, _ = adopted(table.place, table.tag, new, size, merged=True)
                table.commit([action, *(removed(name, merged=True) for name in names)])
                crash.point("store.compacted")
                log.info("compacted", tag=table.tag, files=len(names), into=new)
                merged = True
        return merged

    def _due(self, table: EventTable, target: int) -> tuple[Files, list[int]] | None:
        """The files of the newest snapshot and, by their numbers, the first run of small ones that is long enough to be
        merged. A table to which a newer version of the store has added columns is left alone."""
        files = table.files()
        if files is None:
            return None
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

    def _remove_old(self, table: EventTable) -> bool:
        """Remove the files whose newest event is older than `store.keep_days`."""
        limit_us = int((time.time() - self._config.keep_days * _DAY_S) * 1e6)
        files = table.files()
        old = [] if files is None else np.flatnonzero(files.newest < limit_us).tolist()
        if not old or files is None:
            return False
        names = [files.names[i] for i in old]
        table.remove(names)
        log.info(
            "files deleted after keep_days", tag=table.tag, files=names, keep_days=self._config.keep_days
        )
        return True

    def _vacuum(self, table: EventTable, delta: DeltaTable) -> None:
        now, tag = time.monotonic(), table.tag
        if now - self._swept.setdefault(tag, now - _DAY_S) >= _DAY_S:
            delta.update_incremental()
            delta.vacuum(
                _ORPHAN_HOURS, dry_run=False, enforce_retention_duration=False, full=True,
                post_commithook_properties=NO_HOOKS,
            )  # fmt: skip
            self._swept[tag] = now
        if tag in self._unvacuumed and now - self._unvacuumed[tag] >= self._config.compact_grace_s:
            delta.update_incremental()
            delta.vacuum(dry_run=False, enforce_retention_duration=False, post_commithook_properties=NO_HOOKS)
            del self._unvacuumed[tag]
        table.sync()

    def _checkpoint(self, table: EventTable, delta: DeltaTable) -> None:
        delta.update_incremental()
        if delta.version() - max(0, last_checkpoint(table.place, table.tag)) < _CHECKPOINT_EVERY:
            return
        table.sync()
        delta.create_checkpoint()
        crash.point("store.checkpointed")
        if table.place.needs_sync:
            table.place.make_durable(table.tag, _checkpoint_files(table.place, table.tag))
        delta.cleanup_metadata()


def _checkpoint_files(place: Place, tag: str) -> list[str]:
    found = place.files.get_file_info(fs.FileSelector(f"{place.root}/{tag}/{LOG}"))
    return [f"{LOG}/{i.base_name}" for i in found if "checkpoint" in i.base_name]


def _rows(table: EventTable, names: list[str]) -> Iterator[pa.Table]:
    """All rows of the files, in tables of about 64 MiB, which bounds memory."""
    waiting: list[pa.Table] = []
    size = 0
    for name in names:
        rows = columns.conform(table.tag, table.place.read(table.tag, name))
        waiting.append(rows)
        size += rows.nbytes
        if size >= _GROUP_BYTES:
            yield pa.concat_tables(waiting)
            waiting, size = [], 0
    if waiting:
        yield pa.concat_tables(waiting)
