"""Read access to the store for the pages: one DuckDB in this process, refreshed as files appear."""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

import duckdb

from pipeline.config import Config
from store.lake.lake import open_lake
from store.reading import sql

Row = dict[str, Any]

_REFRESH_S = 2.0
"""A page shows files that are older than this."""
_MEMORY = "200MB"
_REUSE = 20
"""A query that took a second is run again after so many seconds at the earliest, so that pages that refresh
themselves leave the machine to the run."""
_REMEMBERED = 128
_PARAMETER = re.compile(r"\$(\w+)")


class History:
    """The history of one run. Its methods block and may be called from any thread."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` where `store.dir` names no place, `DamagedFileError`. A run without a store is empty."""
        self.config = config
        self._lake, self._shown = open_lake(config), dict[str, list[str]]()
        self._spill = tempfile.TemporaryDirectory(prefix="journeywork-ui-")
        self._connection = duckdb.connect(
            config={"memory_limit": _MEMORY, "threads": "2", "temp_directory": self._spill.name}
        )
        self._results: dict[tuple[str, str], tuple[list[Row], float]] = {}
        """By query and parameters, the rows and the time until which they are returned again."""
        self._lock = threading.Lock()
        self._one = threading.Lock()
        """Held by the query that runs. Three pages over a million runs at once would not fit into the memory. One after
        the other they are not slower: a query uses all threads."""
        self._refreshed_at = -_REFRESH_S
        self._refresh()

    def close(self) -> None:
        """Close the database."""
        self._connection.close()
        self._spill.cleanup()

    def rows(self, query: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        """Run a query of this program (never a user's text) with those of the named parameters (`$name`) that it
        uses; returns its rows."""
        self._refresh()
        names = set(_PARAMETER.findall(query))
        used = {name: value for name, value in (parameters or {}).items() if name in names}
        try:
            return self._run(query, used)
        except duckdb.IOException:  # compaction removed a file: the merged one is there instead
            self._refreshed_at = -_REFRESH_S
            self._refresh()
            return self._run(query, used)

    def _run(self, query: str, parameters: dict[str, Any]) -> list[Row]:
        with self._one, self._connection.cursor() as cursor:
            result = cursor.execute(query, parameters)
            names = [column[0] for column in result.description or ()]
            return [dict(zip(names, row, strict=True)) for row in result.fetchall()]

    def row(self, query: str, parameters: Mapping[str, Any] | None = None) -> Row | None:
        """Run a query as `rows` does; returns its first row, or `None`."""
        return next(iter(self.rows(query, parameters)), None)

    def shared_rows(self, query: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        """Run a query over much of the history as `rows` does, or return its last result if it was read not long ago
        for the time that it took. The rows must not be changed."""
        used = {name: (parameters or {})[name] for name in sorted(set(_PARAMETER.findall(query)))}
        key = query, repr(used)
        rows, stands_until = self._results.get(key, ([], 0.0))
        began = time.monotonic()
        if began < stands_until:
            return rows
        rows = self.rows(query, used)
        now = time.monotonic()
        with self._lock:
            self._results.pop(key, None)
            while len(self._results) >= _REMEMBERED:
                del self._results[next(iter(self._results))]
            self._results[key] = rows, now + max(_REFRESH_S, _REUSE * (now - began))
        return rows

    def _refresh(self) -> None:
        with self._lock:
            if time.monotonic() - self._refreshed_at >= _REFRESH_S:
                sql.define_views(self._connection, self._lake, self._shown)
                self._refreshed_at = time.monotonic()
