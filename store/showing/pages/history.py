"""The store, read for the dashboard's pages: one DuckDB in this process, refreshed as files appear."""

from __future__ import annotations

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
"""A result is cached for this multiple of the query's duration, so that pages that refresh themselves leave the machine
to agents and training."""
_REMEMBERED = 128


class History:
    """The history in the store of one installation. Its methods block and may be called from any thread."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` where `store.dir` names no place, `DamagedFileError`. Without a store there, the history
        is empty."""
        self.config = config
        self._lake = open_lake(config)
        self._files: dict[str, list[str]] = {}
        """By tag, the files that the views read (`sql.define_views`)."""
        self._spill = tempfile.TemporaryDirectory(prefix="journeywork-ui-")
        self._connection = duckdb.connect(
            config={"memory_limit": _MEMORY, "threads": "2", "temp_directory": self._spill.name}
        )
        sql.set_price(self._connection, config)
        self._results: dict[tuple[str, str], tuple[list[Row], float]] = {}
        """By query and parameters, the rows and the time until which they are returned again."""
        self._lock = threading.Lock()
        self._one_query = threading.Lock()
        """Queries run one after the other. Those of three pages over a million trajectories at once would not fit into
        the memory, and would not be faster: each uses all threads."""
        self._refreshed_at = -_REFRESH_S
        self._refresh()

    def close(self) -> None:
        """Close the database."""
        self._connection.close()
        self._spill.cleanup()

    def rows(self, query: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        """Return the rows of a query of this program (never a user's text), with those of the named parameters
        (`$name`) that it uses."""
        self._refresh()
        try:
            return self._run(query, parameters or {})
        except duckdb.IOException:  # compaction removed a file: the merged one is there instead
            self._refreshed_at = -_REFRESH_S
            self._refresh()
            return self._run(query, parameters or {})

    def _run(self, query: str, parameters: Mapping[str, Any]) -> list[Row]:
        """Run a query once over the files that the views read, one query at a time."""
        with self._one_query, self._connection.cursor() as cursor:
            return sql.rows_of(sql.execute(cursor, query, parameters))

    def row(self, query: str, parameters: Mapping[str, Any] | None = None) -> Row | None:
        """Return the first row of a query, or `None`. See `rows`."""
        return next(iter(self.rows(query, parameters)), None)

    def shared_rows(self, query: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        """Return the rows of a query over much of the history, or its cached result (`_REUSE`). The rows must not be
        changed. See `rows`."""
        used = {name: (parameters or {})[name] for name in sorted(set(sql.PARAMETER.findall(query)))}
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
        """Let the views read the files that the lake has now, unless they did so less than `_REFRESH_S` ago."""
        with self._lock:
            if time.monotonic() - self._refreshed_at >= _REFRESH_S:
                sql.define_views(self._connection, self._lake, self._files)
                self._refreshed_at = time.monotonic()
