"""The tables that a comparison reads, without a store, and runs in them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
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


Row = dict[str, Any]
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Run:
    """Times are seconds since `BEGAN`."""

    name: str
    own: bool
    """Whether it is the candidate's."""
    opened: float
    ended: float
    """Infinite: it does not end."""
    known: float
    """When its result is known; infinite: never."""
    outcome: str
    won: float
    cost_usd: float = 0.0
    calls_s: float = 0.0


def at(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


def micros(seconds: float) -> int:
    """A time as microseconds of Unix time."""
    return int((BEGAN.timestamp() + seconds) * 1e6)


def record(
    connection: duckdb.DuckDBPyConnection, runs: Sequence[Run], more: Callable[[Run], Row], project: str = "p"
) -> None:
    """Insert runs. What is known at a run's end is its reward, else it is feedback. `more`: a run's further columns."""
    rows, said = list[Row](), list[Row]()
    for run in runs:
        named: Row = {"project": project, "trajectory": run.name}
        ends, at_once = run.ended < math.inf, run.known == run.ended
        ended = {"outcome": run.outcome if ends else "open", "completed_at": at(run.ended) if ends else None}
        costs = {"cost_usd": run.cost_usd, "calls_s": run.calls_s}
        reward = run.won if ends and at_once else None
        rows.append({**named, **ended, **costs, "opened_at": at(run.opened), "reward": reward, **more(run)})
        if not at_once and run.known < math.inf:
            signal = {"kind": "number", "call": -1, "name": "solved", "value": run.won, "given_at": at(run.known)}
            said.append({**named, **signal})
    insert(connection, trajectories=rows, signals=said)


def insert(connection: duckdb.DuckDBPyConnection, **tables: Sequence[Row]) -> None:
    """Insert rows into tables by name. The rows of a table have the same columns; others get their defaults."""
    for table, rows in tables.items():
        if rows:
            connection.register("given", pa.Table.from_pylist(list(rows)))
            connection.execute(f"INSERT INTO {table} BY NAME FROM given")
            connection.unregister("given")
