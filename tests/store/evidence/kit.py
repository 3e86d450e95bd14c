"""The tables that a comparison reads, without a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import duckdb
import pyarrow as pa

TABLES = """
CREATE TABLE trajectories (project TEXT, model TEXT, trajectory TEXT, outcome TEXT, opened_at TIMESTAMPTZ,
  completed_at TIMESTAMPTZ, first_step INT, last_step INT, reward DOUBLE, exchanges INT DEFAULT 1,
  group_id TEXT DEFAULT '', cost_usd DOUBLE DEFAULT 0, calls_s DOUBLE DEFAULT 0);
CREATE TABLE rewards (project TEXT, trajectory TEXT, branch TEXT, outcome TEXT, reward DOUBLE, scored_at TIMESTAMPTZ);
CREATE TABLE signals (project TEXT, trajectory TEXT, kind TEXT, "call" INT, name TEXT, value DOUBLE,
  given_at TIMESTAMPTZ);
CREATE TABLE rollout_opened (project TEXT, trajectory TEXT, pinned TEXT, asked TEXT DEFAULT '');
"""


def insert(connection: duckdb.DuckDBPyConnection, **tables: Sequence[dict[str, Any]]) -> None:
    """Insert rows into tables by name. The rows of a table have the same columns; others get their defaults."""
    for table, rows in tables.items():
        if rows:
            connection.register("given", pa.Table.from_pylist(list(rows)))
            connection.execute(f"INSERT INTO {table} BY NAME FROM given")
            connection.unregister("given")
