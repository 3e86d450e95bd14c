"""SQL over the store: DuckDB in memory, with the views of `store.reading.views` over the files of the lake. The command
`journeywork sql`.

    journeywork sql "SELECT outcome, count(*) FROM trajectories GROUP BY ALL"
    journeywork sql --format json --run-dir runs/demo "FROM lineage WHERE version = 'inbox@20'"

In Python: `connect("runs/demo").sql("FROM rewards").df()`. A connection sees the files that were there when it was
made.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import msgspec

from pipeline.config import Config, ConfigError
from pipeline.events import schema
from pipeline.running.installations import installation_settings
from pipeline.terminal.parsers import command_parser
from pipeline.terminal.printing import visible, visible_json
from store.lake.lake import Lake, lake_in, open_lake
from store.lake.storage import TRANSIENT, DamagedFileError, StoreError
from store.reading.options import add_installation, run_command
from store.reading.views import VIEWS

PARAMETER = re.compile(r"\$(\w+)")
"""A named parameter in a query."""
TERMINAL_CELL = 60
"""Characters of a cell on a terminal."""
_UNLIMITED = 2**31 - 1
_LONG = ("varchar", "blob", "list", "array", "struct", "map")
"""Types whose values are cut: DuckDB prints a long value on many lines."""


def connect(run_dir: str | Path | Config, query: str | None = None) -> duckdb.DuckDBPyConnection:
    """Return a connection with every table and view over the store of a run; with `query`, only those that it names
    have rows. Raises `StoreError` where there is no store, `DamagedFileError`."""
    connection = duckdb.connect()
    # DuckDB prints the progress of a slow query to stdout, where commands print JSON. In a notebook without ipywidgets
    # it refuses the setting, and prints nothing.
    with contextlib.suppress(duckdb.InvalidInputException):
        connection.execute("SET enable_progress_bar = false")
    config = run_dir if isinstance(run_dir, Config) else installation_settings(run_dir, sections=("store",))
    lake = open_lake(config)
    if not lake.storage.exists():
        raise StoreError(
            f"there is no store at {lake}. If the run has just begun, nothing was recorded yet: try again after "
            "its first calls. Else name another run with --run-dir, or start one with `journeywork up`"
        )
    set_price(connection, config)
    define_views(connection, lake, {}, tags=None if query is None else _tags_of(query))
    return connection


def set_price(connection: duckdb.DuckDBPyConnection, config: Config) -> None:
    """Define the macro by which the views know what an hour of an inference server costs (`store.gpu_usd_h`)."""
    connection.execute(f"CREATE OR REPLACE MACRO gpu_usd_h() AS {config.store.gpu_usd_h!r}::DOUBLE")


def _tags_of(query: str) -> Collection[str]:
    """Return the tags whose rows a query may read: those that it names, also through views; all if it may run SQL that
    is a value."""
    words = set(re.findall(r"\w+", query.lower()))
    for view in reversed(VIEWS):  # each reads only those before it
        if view.name in words:
            words |= set(re.findall(r"\w+", view.sql))
    dynamic = words & {"query", "query_table", "execute"}
    return [tag for tag in schema.tables() if dynamic or table_name(tag) in words]


def damaged_file(lake: Lake, tags: Collection[str]) -> DamagedFileError | None:
    """Read the files of some tags whole. Return the error of the first damaged one, `None` if there is none."""
    for tag in tags:
        for name in lake.names(tag):
            try:
                lake.storage.read(tag, name)
            except DamagedFileError as error:
                return error
            except FileNotFoundError:  # a merge has replaced it
                continue
    return None


def define_views(
    connection: duckdb.DuckDBPyConnection,
    lake: Lake,
    shown: dict[str, list[str]],
    damaged: set[str] | None = None,
    tags: Collection[str] | None = None,
) -> None:
    """Let `connection` see the files that `lake` holds now; without files, every view is empty.

    `shown`: the files of each tag that an earlier call showed, which is updated. Tags whose files are the same are
    left as they are. Raises `DamagedFileError`, unless `damaged` is given: then damaged files are left out, and their
    paths added to it. `tags`: those whose files are looked for; by default all."""
    if not shown:
        lake.storage.attach(connection)
        # DuckDB opens every file that a view reads when the view is made: the documented views are made over no files.
        for tag in schema.tables():
            _define_view_of_tag(connection, lake, tag, [])
        connection.execute("CREATE MACRO IF NOT EXISTS gpu_usd_h() AS 0::DOUBLE")
        for view in VIEWS:
            connection.execute(f"CREATE OR REPLACE VIEW {view.name} AS {view.sql}")
    for tag in schema.tables() if tags is None else tags:
        names = lake.names(tag)
        if names != shown.get(tag, []):
            names = _define_view_of_tag(connection, lake, tag, names, damaged)
        shown[tag] = names


def _define_view_of_tag(
    connection: duckdb.DuckDBPyConnection, lake: Lake, tag: str, names: list[str], left_out: set[str] | None = None
) -> list[str]:
    """Let the view of a tag read the files `names`, or those of the newest version if a merge has replaced them. Return
    the names. Raises `DamagedFileError`, unless such a file can be added to `left_out`."""
    while True:
        try:
            rows = _query_of_files(connection, lake, tag, names) if names else _query_without_rows(tag)
            connection.execute(f"CREATE OR REPLACE VIEW {table_name(tag)} AS {rows}")
        except (duckdb.IOException, duckdb.InvalidInputException, FileNotFoundError) as error:
            damaged = next((name for name in names if name in str(error)), None)
            if damaged is None or any(reason in str(error) for reason in TRANSIENT):
                raise
            if damaged in (names := lake.names(tag)):
                path = f"{lake.storage.uri(tag)}/{damaged}"
                if left_out is None:
                    raise DamagedFileError(path, str(error).splitlines()[0]) from error
                left_out.add(path)
            if left_out:
                names = [name for name in names if f"{lake.storage.uri(tag)}/{name}" not in left_out]
        else:
            return names


@functools.cache
def view_columns() -> dict[str, dict[str, str]]:
    """Return the columns of each documented view, in order, with their meanings, by the view's name."""
    with duckdb.connect() as connection:
        define_views(connection, lake_in(os.devnull), {})  # a lake without files
        return {view.name: view.columns(connection) for view in VIEWS}


def table_name(tag: str) -> str:
    """Return the name of a tag's table: `rollout_exchange` for `rollout.exchange`."""
    return tag.replace(".", "_")


@functools.cache
def _columns_of_tags() -> dict[str, dict[str, str]]:
    """Return by tag the columns of the current schema and their types, as DuckDB writes them."""
    with duckdb.connect() as connection:
        return {
            tag: _column_types(connection, "SELECT " + ", ".join(f'NULL::{_sql_type(c)} AS "{c.name}"' for c in its))
            for tag, its in schema.tables().items()
        }


_SCALARS = {
    "string": "VARCHAR",
    "json": "VARCHAR",
    "int64": "BIGINT",
    "float64": "DOUBLE",
    "bool": "BOOLEAN",
    "binary": "BLOB",
    "timestamp_us": "TIMESTAMP",
    "<i4": "INTEGER",
    "<f4": "FLOAT",
    "u1": "TINYINT",
    "<i8": "BIGINT",
}


def _sql_type(column: schema.Column) -> str:
    """Return the type of a column in SQL. An empty Arrow table would tell it too, but DuckDB imports pandas to read
    one."""
    if column.kind in schema.PACKED:
        return f"{_SCALARS[schema.PACKED[column.kind]]}[]"
    if column.kind == "struct":
        fields = ", ".join(f'"{field.name}" {_sql_type(field)}' for field in column.fields)
        return f"STRUCT({fields})"
    if column.item is not None:
        item = _sql_type(column.item)
        return f"{item}[]" if column.kind == "list" else f"MAP(VARCHAR, {item})"
    return _SCALARS[column.kind]


def _query_without_rows(tag: str) -> str:
    """Return a query that has every column of the current schema of a tag, and no rows."""
    nulls = ", ".join(f'NULL::{kind} AS "{name}"' for name, kind in _columns_of_tags()[tag].items())
    return f"SELECT {nulls} WHERE false"


def _query_of_files(connection: duckdb.DuckDBPyConnection, lake: Lake, tag: str, names: Sequence[str]) -> str:
    """Return a query of the rows in the files `names`. It has every column of the current schema, null where a file is
    older than the column.

    A column that the files hold with its type is read as it is: DuckDB's optimizer then knows its statistics. Behind a
    union or a cast it does not, and it reads whole tables to find a few rows."""
    files = ", ".join(quoted(lake.storage.url(tag, name)) for name in names)
    read = f"FROM read_parquet([{files}], union_by_name = true)"
    stored = _column_types(connection, read)
    selected = []
    for name, wanted in _columns_of_tags()[tag].items():
        if stored.get(name) == wanted:
            selected.append(f'"{name}"')
        else:
            value = f'"{name}"' if name in stored else "NULL"
            selected.append(f'{value}::{wanted} AS "{name}"')
    # The names are quoted, the columns come from the schema.
    return f"SELECT {', '.join(selected)} {read}"


def _column_types(connection: duckdb.DuckDBPyConnection, query: str) -> dict[str, str]:
    """Return the columns of a query and their types, as DuckDB writes them."""
    return {row[0]: row[1] for row in connection.execute(f"DESCRIBE {query}").fetchall()}


def execute(connection: duckdb.DuckDBPyConnection, query: str, values: Mapping[str, Any]) -> duckdb.DuckDBPyConnection:
    """Run a query with those of the named parameters (`$name`) that it uses: DuckDB refuses others."""
    names = set(PARAMETER.findall(query))
    return connection.execute(query, {name: value for name, value in values.items() if name in names})


def quoted(text: str) -> str:
    """Return a text as a string literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def rows_of(result: duckdb.DuckDBPyConnection | duckdb.DuckDBPyRelation) -> list[dict[str, Any]]:
    """Return the rows of a result, with their values by the names of the columns."""
    names = [column[0] for column in result.description or ()]
    return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


# -- output --------------------------------------------------------------------------------------------------------


def write_result(result: duckdb.DuckDBPyRelation | None, form: str, out: Any) -> None:
    """Write a result to the binary file `out` as `table` or `json` (one array), without characters that a terminal
    would act on. On a terminal, cells are cut."""
    if result is None:
        return
    if form == "table":
        out.write(table_text(result, TERMINAL_CELL if out.isatty() else None).encode())
        return
    text = b"[" + b",\n ".join(msgspec.json.encode(row, enc_hook=str) for row in rows_of(result)) + b"]\n"
    out.write(visible_json(text.decode()).encode())


def table_text(result: duckdb.DuckDBPyRelation, cell: int | None) -> str:
    """Return a result as DuckDB prints it, with all rows and columns. Each cell is one line, of at most `cell`
    characters (`None`: of any length)."""
    cells = ", ".join(
        _one_line(i, name, cell) if kind.id in _LONG else f"#{i}"
        for i, (name, kind) in enumerate(zip(result.columns, result.types, strict=True), 1)
    )
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        result.project(cells).show(max_rows=_UNLIMITED, max_width=_UNLIMITED, max_col_width=_UNLIMITED, null_value="∅")
    return visible(text.getvalue()).rstrip() + "\n"


def _one_line(column: int, name: str, cell: int | None) -> str:
    """Return SQL that makes one line, of at most `cell` characters, of each value of a column, given by its number from
    1."""
    text = f"replace(#{column}::VARCHAR, chr(10), '⏎')"
    if cell is not None:
        text = f"CASE WHEN length({text}) > {cell} THEN left({text}, {cell - 1}) || '…' ELSE {text} END"
    return text + ' AS "' + name.replace('"', '""') + '"'


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, or an error's status (`run_command`)."""
    parser = command_parser("sql", "SQL over the history of a run.")
    parser.add_argument("query", help="SQL; `journeywork docs` lists the views")
    add_installation(parser)
    parser.add_argument("--format", default="table", choices=("table", "json"))
    return run_command(parser, _run, argv)


def _run(args: argparse.Namespace) -> int:
    if not duckdb.extract_statements(args.query):
        raise ConfigError('the query is empty: name a view, such as "FROM trajectories" (docs/store.md)')
    config = installation_settings(args.run_dir, args.config, sections=("store",))
    with connect(config, args.query) as connection:
        try:
            write_result(connection.sql(args.query), args.format, sys.stdout.buffer)
        except duckdb.CatalogException as error:
            raise ConfigError(f'{error}\n`journeywork sql "SHOW TABLES"` lists all tables and views') from error
        except (duckdb.ParserException, duckdb.BinderException):
            raise
        except duckdb.Error as error:
            # DuckDB names no file whose damage lies before its footer.
            raise damaged_file(open_lake(config), _tags_of(args.query)) or error from error
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
