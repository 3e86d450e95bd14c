"""SQL over the store: DuckDB in memory, with the views of `store.views` over the Parquet files.

    journeyman sql "SELECT outcome, count(*) FROM trajectories GROUP BY ALL"
    journeyman sql --format csv --run-dir runs/demo "FROM lineage WHERE version = 'tictactoe@60'"

In Python: `connect("runs/demo").sql("FROM rewards").df()`. A connection sees the files that were there when it was made;
`refresh` shows it those of now.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import msgspec

from pipeline.config import Config, ConfigError, NatsConfig, load
from pipeline.events import schema
from pipeline.events.schema import Column
from store.catalog import live
from store.target import StoreError, Target, open_target
from store.views import VIEWS

_TYPES = {
    "string": "VARCHAR",
    "json": "VARCHAR",
    "int64": "BIGINT",
    "float64": "DOUBLE",
    "bool": "BOOLEAN",
    "binary": "BLOB",
    "timestamp_us": "TIMESTAMP",
    "list<int32>": "INTEGER[]",
    "list<float32>": "FLOAT[]",
    "list<uint8>": "UTINYINT[]",
    "list<int64>": "BIGINT[]",
}

_WIDEST = 60


class NoStoreError(StoreError):
    """There is no store where one was looked for."""


def sql_type(column: Column) -> str:
    """The DuckDB type of a column, such as `STRUCT("trajectory" VARCHAR, "score" DOUBLE)[]`."""
    if column.kind == "list":
        assert column.item is not None
        return f"{sql_type(column.item)}[]"
    if column.kind == "map":
        assert column.item is not None
        return f"MAP(VARCHAR, {sql_type(column.item)})"
    if column.kind == "struct":
        return "STRUCT(" + ", ".join(f'"{f.name}" {sql_type(f)}' for f in column.fields) + ")"
    return _TYPES[column.kind]


def connect(run_dir: str | Path | Config) -> duckdb.DuckDBPyConnection:
    """A connection with every table and view over the store of a run. Raises `NoStoreError`, `DamagedFileError`."""
    connection = duckdb.connect()
    refresh(connection, run_dir)
    return connection


def refresh(connection: duckdb.DuckDBPyConnection, run_dir: str | Path | Config) -> None:
    """Let `connection` see the files that are there now."""
    config = run_dir if isinstance(run_dir, Config) else _config_of(Path(run_dir))
    target = open_target(config)
    if not target.exists():
        raise NoStoreError(f"there is no store at {target}: has anything run there yet?")
    target.attach(connection)
    for tag in schema.tables():
        connection.execute(table_sql(target, tag))
    for view in VIEWS:
        connection.execute(f"CREATE OR REPLACE VIEW {view.name} AS {view.sql}")


def table_name(tag: str) -> str:
    return tag.replace(".", "_")


def table_sql(target: Target, tag: str) -> str:
    """The view over one tag's files: every column of today's schema, null where a file is older than the column."""
    columns = schema.tables()[tag]
    nothing = "SELECT " + ", ".join(f'NULL::{sql_type(c)} AS "{c.name}"' for c in columns) + " WHERE false"
    names = live(target, tag)
    for name in names:
        target.check(tag, name)
    view = f"CREATE OR REPLACE VIEW {table_name(tag)} AS "
    if not names:
        return view + nothing
    files = ", ".join(_quoted(target.url(tag, n)) for n in names)
    wanted = ", ".join(f'"{c.name}"' for c in columns)
    # Names are quoted; columns come from the schema.
    every = f"SELECT * FROM ({nothing}) UNION ALL BY NAME SELECT * FROM read_parquet([{files}], union_by_name = true)"  # noqa: S608
    return f"{view}SELECT {wanted} FROM ({every})"  # noqa: S608


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _config_of(run_dir: Path) -> Config:
    """The settings a run was started with, or the default ones for a folder without."""
    saved = run_dir / "config.toml"
    config = load(saved) if saved.is_file() else Config()
    return msgspec.structs.replace(config, run_dir=str(run_dir))


def newest_run(root: Path = Path("runs")) -> Path:
    """The run whose store was written to last. Raises `NoStoreError`."""
    stores = [p for p in root.glob("*/store") if p.is_dir()]
    if not stores:
        raise NoStoreError(
            f"no run with a store under {root.resolve()}: say which with --run-dir, or start one with `journeyman up`"
        )
    return max(stores, key=_last_written).parent


def _last_written(folder: Path) -> float:
    return max((p.stat().st_mtime for p in [folder, *folder.iterdir()] if p.exists()), default=0.0)


# -- output --------------------------------------------------------------------------------------------------------


def write_result(result: duckdb.DuckDBPyRelation | None, form: str, out: Any) -> None:
    """Write a result to the binary file `out` as `table`, `json` (one array), `csv` or `parquet`."""
    if result is None:
        return
    if form == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(result.to_arrow_table(), out, compression="zstd")
        return
    names, rows = result.columns, result.fetchall()
    if form == "json":
        records = [dict(zip(names, row, strict=True)) for row in rows]
        text = b",\n ".join(msgspec.json.encode(r, enc_hook=str) for r in records)
        out.write(b"[" + text + b"]\n")
    elif form == "csv":
        out.write(_csv(names, rows).encode())
    else:
        out.write(table_text(names, rows).encode())


def _csv(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_cell(v, "") for v in row] for row in rows)
    return text.getvalue()


def _cell(value: Any, null: str) -> str:
    if value is None:
        return null
    if isinstance(value, dict | list | tuple):
        return msgspec.json.encode(value, enc_hook=str).decode()
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def _short(text: str) -> str:
    text = text.replace("\n", "⏎")
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def table_text(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns, numbers to the right, then the number of rows."""
    cells = [[_short(f"{v:.6g}" if isinstance(v, float) else _cell(v, "∅")) for v in row] for row in rows]
    widths = [max([len(n), *(len(c[i]) for c in cells)]) for i, n in enumerate(names)]
    right = [bool(rows) and all(_is_number(r[i]) for r in rows) for i in range(len(names))]

    def line(values: Sequence[str]) -> str:
        parts = [v.rjust(w) if r else v.ljust(w) for v, w, r in zip(values, widths, right, strict=True)]
        return "  ".join(parts).rstrip()

    count = f"({len(rows)} row{'' if len(rows) == 1 else 's'})"
    return "\n".join([line(names), "  ".join("─" * w for w in widths), *map(line, cells), count, ""])


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="journeyman sql", description="SQL over everything that ever happened."
    )
    parser.add_argument("query", help="SQL; the views are in docs/store.md")
    parser.add_argument("--run-dir", help="run to ask; default: the one under runs/ that was written to last")
    parser.add_argument("--config", help="settings of the run to ask")
    parser.add_argument("--format", default="table", choices=("table", "json", "csv", "parquet"))
    return parser.parse_args(argv)


def run_config(run_dir: str | None, config: str | None) -> Config:
    """Which run a command means, from its options."""
    if config:
        return load(config)
    return _config_of(Path(run_dir) if run_dir else newest_run())


def run_nats(config: Config, url: str | None = None) -> NatsConfig:
    """The log of a run: `url`, else the server of its settings, else the one `journeyman up` started for it."""
    if url or config.nats.url:
        return msgspec.structs.replace(config.nats, url=url or config.nats.url)
    state = config.path("state.json")
    if not state.is_file():
        raise ConfigError(
            f"{config.run_dir} names no NATS server: give --nats-url, or start it with `journeyman up`"
        )
    return msgspec.structs.replace(config.nats, url=msgspec.json.decode(state.read_bytes())["urls"]["nats"])


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 with a line on stderr where the query or the store is at fault."""
    args = parse_args(argv)
    try:
        with connect(run_config(args.run_dir, args.config)) as connection:
            write_result(connection.sql(args.query), args.format, sys.stdout.buffer)
    except (StoreError, ConfigError, duckdb.Error) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
