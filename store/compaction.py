"""Merges small files into large ones, and deletes files that are older than `store.keep_days`.

A compacted file lists in its footer the files whose rows it holds. From the moment it has its name, readers take
it and leave those out (`catalog.live`). Readers that listed files before that still find the old ones, which are
deleted only after `store.compact_grace_s`. So no reader sees a row twice or misses one, and after a crash at any
point either the old files are live or the new one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import anyio
import anyio.to_thread
import pyarrow as pa

from pipeline import crash
from pipeline.config import StoreConfig
from pipeline.events import schema
from pipeline.telemetry.logs import get_logger
from store import columns
from store.catalog import REPLACES, Catalog, FileName, live, replaced_by

log = get_logger("store.compaction")

_GROUP_BYTES = 64 * 1024 * 1024
_DAY_S = 86_400.0


class Compactor:
    """Compacts the files of one store process."""

    def __init__(self, catalog: Catalog, config: StoreConfig) -> None:
        self._catalog, self._target, self._config = catalog, catalog.target, config

    async def run(self) -> None:
        """Compact every `store.compact_s` seconds until cancelled."""
        while True:
            await anyio.sleep(self._config.compact_s)
            # A thread can't be stopped: a cancellation waits for the end of the round.
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self.once)

    def once(self) -> None:
        """One round over every tag: merge, then delete files that were replaced long enough ago or are too old."""
        for tag in schema.tables():
            self._merge(tag)
            self._remove_replaced(tag)
            if self._config.keep_days > 0:
                self._remove_old(tag)

    def _merge(self, tag: str) -> None:
        for inputs in self._due(tag):
            first, last = min(f.first for f in inputs), max(f.last for f in inputs)
            start = min(inputs)
            name = FileName(start.stream, first, last, start.at, max(f.level for f in inputs) + 1)
            names = [str(f) for f in inputs]
            # The files that the inputs replaced must stay replaced after the inputs are deleted.
            before = [n for f in inputs if f.level for n in replaced_by(self._target, tag, str(f))]
            footer = {"journeyman.event": tag, REPLACES: json.dumps(sorted({*names, *before}))}
            self._target.write(tag, str(name), self._rows(tag, names), footer)
            crash.point("store.compacted")
            log.info("compacted", tag=tag, files=len(names), into=str(name))

    def _due(self, tag: str) -> Iterator[list[FileName]]:
        """Runs of small files with adjacent sequences, each long enough to merge."""
        small = [
            f
            for n in live(self._target, tag)
            if (f := FileName.parse(n)) is not None
            and self._target.size(tag, n) < self._config.compact_bytes // 2
            and self._readable(tag, n)
        ]
        run: list[FileName] = []
        size = 0
        for file in sorted(small):
            if run and (file.stream != run[0].stream or size >= self._config.compact_bytes):
                if len(run) >= self._config.compact_files:
                    yield run
                run, size = [], 0
            run.append(file)
            size += self._target.size(tag, str(file))
        if len(run) >= self._config.compact_files:
            yield run

    def _readable(self, tag: str, name: str) -> bool:
        """Whether this version knows all columns of the file. A file of a newer version is left as it is."""
        return set(self._target.column_names(tag, name)) <= set(columns.arrow_schema(tag).names)

    def _rows(self, tag: str, names: list[str]) -> Iterator[pa.Table]:
        """All rows of the files, in tables of about 64 MiB, which bounds memory."""
        waiting: list[pa.Table] = []
        size = 0
        for name in names:
            table = columns.conform(tag, self._target.read(tag, name))
            waiting.append(table)
            size += table.nbytes
            if size >= _GROUP_BYTES:
                yield pa.concat_tables(waiting)
                waiting, size = [], 0
        if waiting:
            yield pa.concat_tables(waiting)

    def _remove_replaced(self, tag: str) -> None:
        names = set(self._target.names(tag))
        now = time.time()
        for name in sorted(names):
            parsed = FileName.parse(name)
            if parsed is None or not parsed.level:
                continue
            gone = [n for n in replaced_by(self._target, tag, name) if n in names]
            if not gone or now - self._target.modified(tag, name) < self._config.compact_grace_s:
                continue
            # Lowest level first: a file must outlive the files that it replaces.
            for i, old in enumerate(sorted(gone, key=lambda n: (FileName.parse(n) or parsed).level)):
                self._target.remove(tag, old)
                if i == 0:
                    crash.point("store.half_removed")
            names -= set(gone)

    def _remove_old(self, tag: str) -> None:
        limit_us = int((time.time() - self._config.keep_days * _DAY_S) * 1e6)
        for name in live(self._target, tag):
            parsed = FileName.parse(name)
            if parsed is None or parsed.at >= limit_us or self._target.newest(tag, name) >= limit_us:
                continue
            if parsed.level and set(replaced_by(self._target, tag, name)) & set(self._target.names(tag)):
                continue  # the files that it replaced go first, in the next round
            self._target.remove(tag, name)
            log.info("file deleted after keep_days", tag=tag, file=name, keep_days=self._config.keep_days)
