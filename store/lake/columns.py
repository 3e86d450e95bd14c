"""Converts events to Arrow tables.

Events hold token ids, logprobs and masks as packed arrays. A list column is built from the joined bytes of all rows and
their lengths, so that no token becomes a Python number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from pipeline import events
from pipeline.events import AnyEvent, schema
from pipeline.events.schema import Column

# Delta Lake has no unsigned numbers. Masks hold 0 and 1.
_ITEMS = {"<i4": pa.int32(), "<f4": pa.float32(), "u1": pa.int8(), "<i8": pa.int64()}
_SCALARS = {
    "string": pa.string(),
    "json": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "binary": pa.binary(),
    "timestamp_us": pa.timestamp("us"),
}


class UnstorableError(ValueError):
    """An event can be decoded but does not fit its table, for example because a packed array ends within an item."""


@functools.cache
def arrow_type(column: Column) -> pa.DataType:
    """Return the Arrow type of a column. Items of packed lists are never null."""
    if column.kind in schema.PACKED:
        return pa.list_(pa.field("item", _ITEMS[schema.PACKED[column.kind]], nullable=False))
    if column.kind == "list":
        assert column.item is not None
        return pa.list_(pa.field("item", arrow_type(column.item)))
    if column.kind == "map":
        assert column.item is not None
        return pa.map_(pa.string(), arrow_type(column.item))
    if column.kind == "struct":
        return pa.struct([pa.field(f.name, arrow_type(f)) for f in column.fields])
    return _SCALARS[column.kind]


@functools.cache
def arrow_schema(tag: str) -> pa.Schema:
    """Return the Arrow schema of a tag. Every column is nullable because older files lack newer columns."""
    return pa.schema([pa.field(c.name, arrow_type(c)) for c in schema.tables()[tag]])


def packed_list(values: Sequence[bytes], dtype: str) -> pa.ListArray:
    """Return a list column made from packed arrays of `dtype`, one per row.

    Raises `UnstorableError` if an array ends within an item."""
    size = np.dtype(dtype).itemsize
    lengths = np.fromiter(map(len, values), dtype=np.int64, count=len(values))
    if size > 1 and (lengths % size).any():
        raise UnstorableError(f"the length of a packed array of {dtype} is no multiple of {size} bytes")
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum(lengths // size, out=offsets[1:])
    data = pa.py_buffer(b"".join(values))
    items = pa.Array.from_buffers(_ITEMS[dtype], int(offsets[-1]), [None, data])
    kind = pa.list_(pa.field("item", _ITEMS[dtype], nullable=False))
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(offsets)], children=[items])


def _text_column(values: Sequence[bytes]) -> pa.Array:
    """Return a text column made from UTF-8 bytes, one per row. Invalid bytes are replaced, so that the event can be
    stored."""
    try:
        return pa.array(values, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([v.decode("utf-8", "replace") for v in values], pa.string())


def _for_arrow(value: Any) -> Any:
    """Convert a value inside an event to the form that pyarrow accepts: structs to dicts, maps to lists of pairs."""
    if isinstance(value, msgspec.Struct):
        return {name: _for_arrow(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return [_for_arrow(v) for v in value]
    if isinstance(value, dict):
        return list(value.items())
    return value


def _builder(column: Column) -> Callable[[list[Any]], pa.Array]:
    """Return the function that makes the column of a table from the values of its field in several events."""
    if column.kind in schema.PACKED:
        dtype = schema.PACKED[column.kind]
        return lambda values: packed_list(values, dtype)
    if column.kind == "json":
        return _text_column
    kind = arrow_type(column)
    if column.kind in ("list", "map", "struct"):
        return lambda values: pa.array([_for_arrow(v) for v in values], kind)
    return lambda values: pa.array(values, kind)


@functools.cache
def _builders(tag: str) -> tuple[tuple[str, Callable[[list[Any]], pa.Array]], ...]:
    """Return the names and builders of a tag's columns, without those of the envelope, which `table` makes itself."""
    skip = len(schema.ENVELOPE)
    return tuple((c.name, _builder(c)) for c in schema.tables()[tag][skip:])


def table(
    tag: str, rows: Sequence[AnyEvent], seqs: Sequence[int], ats: Sequence[int], traces: Sequence[str]
) -> pa.Table:
    """Return events of one tag as a table, with their stream sequences, stream times (microseconds) and trace parents.

    Raises `UnstorableError` if a row does not fit; `why_unstorable` tells for each event."""
    arrays = [pa.array(seqs, pa.int64()), pa.array(ats, pa.timestamp("us")), pa.array(traces, pa.string())]
    try:
        for name, build in _builders(tag):
            arrays.append(build([getattr(row, name) for row in rows]))
    except (pa.ArrowException, UnicodeEncodeError, OverflowError) as error:
        raise UnstorableError(str(error)) from error
    return pa.Table.from_arrays(arrays, schema=arrow_schema(tag))


def why_unstorable(event: AnyEvent) -> str:
    """Return why `event` can't be stored; empty if it can."""
    try:
        table(events.wire_name(event), [event], [0], [0], [""])
    except UnstorableError as error:
        return str(error)
    return ""


def split_columns(tag: str) -> tuple[list[str], list[str]]:
    """Return the Parquet leaf paths to encode as byte-stream-split (packed numbers) and as dictionary (short text)."""
    split, dictionary = [], []
    for column in schema.tables()[tag]:
        if column.kind in ("list<int32>", "list<float32>"):
            split.append(f"{column.name}.list.element")
        elif column.kind == "string":
            dictionary.append(column.name)
    return split, dictionary
