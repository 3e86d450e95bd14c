"""Read access to the store for the pages: one DuckDB in this process, refreshed as files appear."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from typing import Any

import duckdb

from pipeline.config import Config
from store import sql
from store.location import open_target

Row = dict[str, Any]

_REFRESH_S = 2.0
"""A page shows files that are older than this."""
_MEMORY = "300MB"
_PARAMETER = re.compile(r"\$(\w+)")


class History:
    """The history of one run. Its methods block and may be called from any thread."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` where `store.dir` names no place, `DamagedFileError`. A run without a store is empty."""
        self.config = config
        self._target, self._shown = open_target(config), dict[str, list[str]]()
        self._connection = duckdb.connect(config={"memory_limit": _MEMORY, "threads": "2"})
        self._lock = threading.Lock()
        self._refreshed_at = -_REFRESH_S
        self._refresh()

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def rows(self, query: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        """Run a query of this program (never a user's text) with those of the named parameters (`$name`) that it
        uses; returns its rows."""
        self._refresh()
        used = set(_PARAMETER.findall(query))
        with self._connection.cursor() as cursor:
            result = cursor.execute(
                query, {name: v for name, v in (parameters or {}).items() if name in used}
            )
            names = [column[0] for column in result.description or ()]
            return [dict(zip(names, row, strict=True)) for row in result.fetchall()]

    def row(self, query: str, parameters: Mapping[str, Any] | None = None) -> Row | None:
        """Run a query as `rows` does; returns its first row, or `None`."""
        found = self.rows(query, parameters)
        return found[0] if found else None

    def _refresh(self) -> None:
        with self._lock:
            if time.monotonic() - self._refreshed_at >= _REFRESH_S:
                sql.show(self._connection, self._target, self._shown)
                self._refreshed_at = time.monotonic()
