"""Converts Parquet rows back to the events that were stored. `journeywork replay` reads history through it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, TypeVar

import duckdb
import msgspec
import numpy as np
import pyarrow as pa

from pipeline.events import Event, ExchangeRecorded, TrajectoryCompleted, TrajectoryOpened, schema, wire_name
from pipeline.events.schema import Column

E = TypeVar("E", bound=Event)
_EPOCH = datetime(1970, 1, 1)
"""In UTC, as all times of the history, which have no zone."""


def _value(column: Column, value: Any) -> Any:
    """Return the value of a column, as Arrow gives it, as the event's field has it."""
    if column.kind in schema.PACKED:
        return np.asarray(value, dtype=schema.PACKED[column.kind]).tobytes()
    if column.kind == "json":
        return value.encode()
    if column.kind == "timestamp_us":
        return (value - _EPOCH) // timedelta(microseconds=1)  # not by a float, which would round it
    if column.kind == "list":
        assert column.item is not None
        return [_value(column.item, v) for v in value]
    if column.kind == "struct":
        return {f.name: _value(f, value[f.name]) for f in column.fields if value[f.name] is not None}
    if column.kind == "map":
        return dict(value)
    return value


def events(cls: type[E], table: pa.Table) -> list[E]:
    """Return the rows of the table of `cls` as events. A column is null where the file is older than the field: the
    event then has the field's default."""
    columns = schema.columns(cls)
    rows = table.select([c.name for c in columns]).to_pylist()
    return [
        msgspec.convert(
            {c.name: _value(c, row[c.name]) for c in columns if row[c.name] is not None} | {"type": wire_name(cls)},
            cls,
            builtin_types=(bytes,),
        )
        for row in rows
    ]


def trajectory(connection: duckdb.DuckDBPyConnection, project: str, name: str) -> Iterator[Event]:
    """Yield the events of the trajectory `name`: opened, exchanges in order, completed."""
    for cls, order in (
        (TrajectoryOpened, "log_at, log_seq"),
        (ExchangeRecorded, "seq, choice"),
        (TrajectoryCompleted, "log_at, log_seq"),
    ):
        events_table = wire_name(cls).replace(".", "_")
        query = f"SELECT * FROM {events_table} WHERE project = ? AND trajectory = ? ORDER BY {order}"  # noqa: S608
        table = connection.sql(query, params=[project, name]).to_arrow_table()
        yield from events(cls, table)
