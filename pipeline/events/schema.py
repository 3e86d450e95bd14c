"""The one schema, read off the event classes: columns for Parquet, rows for the event reference.

A `Column` says what a field is without saying in which library; `store.lake.columns` turns it into Arrow,
`pipeline.docs` into prose. What a field means is its docstring in `pipeline.events`.

Kinds: `string`, `int64`, `float64`, `bool`, `binary`, `json` (text), `timestamp_us` (UTC), `list<int32>` and the
other packed lists, `list` (of `item`), `struct` (of `fields`), `map` (string to `item`).
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
import typing
from dataclasses import dataclass, replace
from typing import Any, Literal, Union

import msgspec

from pipeline.events.codec import EVENTS, wire_name

PACKED = {"list<int32>": "<i4", "list<float32>": "<f4", "list<uint8>": "u1", "list<int64>": "<i8"}
"""Kinds whose field is packed bytes, with the numpy type of one value."""

_SCALARS = {str: "string", int: "int64", float: "float64", bool: "bool", bytes: "binary"}


class SchemaError(TypeError):
    """A field's type has no column type; say how it is stored in `pipeline.events.schema`."""


@dataclass(frozen=True)
class Column:
    """One field of an event (or of a struct in it)."""

    name: str
    kind: str
    doc: str = ""
    nullable: bool = False
    default: str = ""
    """The default as the reference shows it; empty if the field is required."""
    choices: tuple[str, ...] = ()
    item: Column | None = None
    fields: tuple[Column, ...] = ()

    @property
    def type_name(self) -> str:
        """`list<struct<trajectory, score>>`, `map<string, float64>`, `string`, …"""
        if self.kind == "list" and self.item is not None:
            return f"list<{self.item.type_name}>"
        if self.kind == "map" and self.item is not None:
            return f"map<string, {self.item.type_name}>"
        if self.kind == "struct":
            return f"struct<{', '.join(f.name for f in self.fields)}>"
        return self.kind


def meaning(column: Column) -> str:
    """Return what a column means, with the values that it can have where these are few."""
    choices = f"One of {', '.join(f'`{choice}`' for choice in column.choices)}." if column.choices else ""
    return f"{column.doc} {choices}".strip()


ENVELOPE: tuple[Column, ...] = (
    Column("log_seq", "int64", "Sequence of the event in its stream."),
    Column("log_at", "timestamp_us", "When the broker stored the event, UTC."),
    Column("traceparent", "string", "W3C trace context of the message; empty where it had none."),
)
"""Columns that every file has before those of its event."""


def docstrings(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a class and of its bases, by the field's name, base classes first."""
    bases = [base for base in reversed(cls.__mro__) if base.__module__ != "builtins" and base is not msgspec.Struct]
    return {field: text for base in bases for field, text in _own_docstrings(base).items()}


@functools.cache
def _own_docstrings(cls: type) -> dict[str, str]:
    """Return the docstrings of the fields that a class itself declares, read from its source; none without a source."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except OSError:
        return {}
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    out = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            out[field.target.id] = inspect.cleandoc(text.value.value).replace("\n", " ")
    return out


def columns(struct: type[msgspec.Struct]) -> tuple[Column, ...]:
    """Return the columns of an event class (without the envelope) or of a struct inside one, without their meanings."""
    hints = typing.get_type_hints(struct, include_extras=True)
    fields = msgspec.structs.fields(struct)
    return tuple(replace(_column(f.name, hints[f.name]), default=_default(f)) for f in fields)


def documented(struct: type[msgspec.Struct]) -> tuple[Column, ...]:
    """Return `columns` with their meanings (`doc`), which are read from the source of the class."""
    docs = docstrings(struct)
    return tuple(replace(column, doc=docs.get(column.name, "")) for column in columns(struct))


def _default(field: msgspec.structs.FieldInfo) -> str:
    """Return a field's default as the reference shows it; empty if the field is required."""
    if field.default is not msgspec.NODEFAULT:
        return repr(field.default)
    if field.default_factory is not msgspec.NODEFAULT:
        factory = field.default_factory
        return repr(factory()) if factory in (dict, list, tuple, set) else f"{factory.__name__}()"
    return ""


def _column(name: str, hint: Any) -> Column:
    """Return the column of a field with the type `hint`, without its meaning and default.

    Raises `SchemaError` for a type that has no column type: among others a union of two types, and literals that are
    no strings. An annotation `msgspec.Meta(extra={"column": kind})` names the kind of what is packed or encoded."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        for extra in args[1:]:
            if isinstance(extra, msgspec.Meta) and extra.extra and "column" in extra.extra:
                nullable = type(None) in typing.get_args(args[0])
                return Column(name, extra.extra["column"], nullable=nullable)
        return _column(name, args[0])
    if origin is Literal and all(isinstance(choice, str) for choice in args):
        return Column(name, "string", choices=args)
    if origin in (Union, types.UnionType) and len(args) == 2 and type(None) in args:
        inner = args[0] if args[1] is type(None) else args[1]
        return replace(_column(name, inner), nullable=True)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return Column(name, "list", item=_column("item", args[0]))
    if origin is dict and args[0] is str:
        return Column(name, "map", item=_column("value", args[1]))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return Column(name, "struct", fields=columns(hint))
    if hint in _SCALARS:
        return Column(name, _SCALARS[hint])
    raise SchemaError(f"field {name!r} of type {hint!r} has no column type")


@functools.cache
def tables() -> dict[str, tuple[Column, ...]]:
    """Return the columns of each event's files by the event's tag, those of the envelope first."""
    return {wire_name(cls): ENVELOPE + columns(cls) for cls in EVENTS}
