"""The SQL box: a user's query over the views, in a process of its own.

The process has a time limit and a memory limit. Its DuckDB may read the store's files and nothing else: no other file,
no network, no extension, no second database, and no change of a setting. A query is one `SELECT` statement (also
written as `FROM`, `WITH`, `DESCRIBE`, `SUMMARIZE` or `EXPLAIN`)."""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa

from pipeline.config import Config, load
from pipeline.telemetry.logs import get_logger
from store.lake.lake import Lake, open_lake
from store.lake.storage import StoreError
from store.reading import sql

log = get_logger("store.showing.dashboard.sandbox")

ROWS = 1_000
"""Rows that a page shows at most."""
TIME_S = 10.0
"""Seconds after which a query is stopped."""
_CELL = 2_000
"""Characters of a cell that are returned at most."""
_MEMORY = "256MB"
_ADDRESS_SPACE = 4 << 30
_GRACE_S = 5.0
"""Time for the process to start, beyond the query's own."""


class SandboxError(Exception):
    """The query was refused, failed, or took too long. The message says which, for the user."""


class Result(msgspec.Struct, frozen=True):
    """The answer to a query."""

    columns: list[str] = []
    types: list[str] = []
    rows: list[list[Any]] = []
    cut: bool = False
    """Whether there were more rows than `ROWS`."""
    error: str = ""
    """Why there is no answer."""


def run(settings: Path, query: str, time_s: float = TIME_S) -> Result:
    """Run a user's query over the run whose settings file is given. Blocks. Raises `SandboxError`."""
    # -P: the module is found where this process found it, never in the working directory.
    command = [sys.executable, "-P", "-m", "store.showing.dashboard.sandbox", str(settings), str(time_s)]
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # Object storage needs its credentials. The query can't read an environment.
    environment |= {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    try:
        ended = subprocess.run(
            command,
            input=query.encode(),
            capture_output=True,
            timeout=time_s + _GRACE_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SandboxError(_too_long(time_s)) from None
    if ended.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise SandboxError(_too_long(time_s))
    if ended.returncode:
        log.error("the SQL box's process failed", code=ended.returncode, error=ended.stderr.decode()[-2000:])
        raise SandboxError(
            f"The query's process failed (exit {ended.returncode}). The dashboard's log has its output."
        )
    result = msgspec.json.decode(ended.stdout, type=Result)
    if result.error:
        raise SandboxError(result.error)
    return result


def _too_long(time_s: float) -> str:
    return f"The query took more than {time_s:g} s and was stopped. Ask for less."


def answer(config: Config, query: str, time_s: float) -> Result:
    """Run a user's query in this process, which the caller bounds in memory. Raises `SandboxError`, `StoreError`,
    `duckdb.Error`."""
    statements = duckdb.extract_statements(query)
    if len(statements) != 1:
        raise SandboxError(f"Write one statement; this is {len(statements)}.")
    if statements[0].type not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
        raise SandboxError("The SQL box reads: write a SELECT statement.")
    with duckdb.connect(config={"memory_limit": _MEMORY, "threads": "1", "temp_directory": ""}) as connection:
        lake = open_lake(config)
        sql.define_views(connection, lake, {})
        _lock_down(connection, lake)
        timer = threading.Timer(time_s, connection.interrupt)
        timer.start()
        try:
            reader = connection.execute(query).to_arrow_reader(ROWS + 1)
            assert reader is not None  # the statement is a SELECT
            batches, found = [], 0
            for batch in reader:
                batches.append(batch)
                if (found := found + batch.num_rows) > ROWS:
                    break
        except duckdb.InterruptException:
            raise SandboxError(_too_long(time_s)) from None
        finally:
            timer.cancel()
    table = pa.Table.from_batches(batches, reader.schema).slice(0, ROWS)
    rows = [
        [_cell(value) for value in row] for row in zip(*(c.to_pylist() for c in table.columns), strict=True)
    ]
    return Result(reader.schema.names, [str(field.type) for field in reader.schema], rows, found > ROWS)


def _lock_down(connection: duckdb.DuckDBPyConnection, lake: Lake) -> None:
    """From here on `connection` reads the store's files and nothing else, for good."""
    connection.execute("SET allowed_directories = $folders", {"folders": [lake.storage.duckdb_root]})
    for setting, value in (
        ("allow_community_extensions", False),
        ("autoinstall_known_extensions", False),
        ("autoload_known_extensions", False),
        ("enable_external_access", False),
        ("lock_configuration", True),
    ):
        connection.execute(f"SET {setting} = {value}")


def _cell(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return (
            "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        )  # JSON has no such numbers
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= _CELL else text[: _CELL - 1] + "…"


def main() -> None:
    """Answer the query on standard input, as JSON on standard output. For `run` only."""
    settings, time_s = sys.argv[1], float(sys.argv[2])
    query = sys.stdin.read()
    config = load(settings)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time_s) + 1, int(time_s) + 2))
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    try:
        result = answer(config, query, time_s)
    except (duckdb.Error, SandboxError, StoreError) as error:
        result = Result(error=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
