"""Give the feedback in a CSV or Parquet file, or what people said in Langfuse: `journeywork feedback`.

    journeywork feedback answers.csv
    journeywork feedback --langfuse 7                 the scores that people gave there in the last seven days

    answer,thumb,text
    chatcmpl-t-20261122T093012Z-5f1c.8d0a3bd1c2f4e596,down,the other account

Each row is one piece of feedback. Columns are the fields of docs/gateway.md, and `trajectory` for the run; `scale` and
`ranking` hold JSON lists. A row by an answer's id is about the call, unless `about` is `run`. An empty cell is a field
that is left out. A row without `key` has one that is made of its contents, so a file may be given again: each row
counts once.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import inspect
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx

from journeywork import langfuse_scores
from journeywork.client import AsyncJourneywork
from journeywork.command_line import add_connection, client_of, exit_status, gateway_of, not_negative
from journeywork.transport import GatewayUnavailableError, JourneyworkError, plain_errors

COLUMNS = (
    "trajectory",
    "answer",
    "about",
    "call",
    "role",
    "name",
    "value",
    "scale",
    "thumb",
    "ranking",
    "correction",
    "corrected_by",
    "text",
    "key",
    "source",
)
_KEY_ADVICE = " Set JOURNEYWORK_API_KEY, or name the variable that holds the key with --api-key-env."
_AT_ONCE = 16
_MOST_SHOWN = 20
"""Refused rows that are printed one by one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if every row is on the log, 1 if some are refused."""
    parser = argparse.ArgumentParser(
        prog="journeywork feedback",
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("file", type=Path, nargs="?", help="its name ends in .csv or .parquet")
    given.add_argument(
        "--langfuse", type=not_negative, metavar="DAYS", help="scores of the project that LANGFUSE_* name"
    )
    add_connection(parser)
    args = parser.parse_args(argv)
    with exit_status((ValueError, OSError, csv.Error), (JourneyworkError, httpx.HTTPError)):
        client = client_of(gateway_of(args), args)
        given_rows = rows(args.file) if args.file else langfuse_scores.rows(args.langfuse)
        report = anyio.run(_give_all, client, list(given_rows))
    if args.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        for refusal in report["refused"][:_MOST_SHOWN]:
            sys.stderr.write(f"row {refusal['row']}: {refusal['error']}\n")
        refused = len(report["refused"])
        sys.stdout.write(f"{report['given']} given, {report['repeated']} given before, {refused} refused\n")
    return 1 if report["refused"] else 0


def rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, without empty cells. Raises `ValueError` for a file or column of another kind."""
    match file.suffix:
        case ".csv":
            with file.open(newline="", encoding="utf-8-sig") as lines:
                reader = csv.DictReader(lines, restkey="further cells")
                _check_columns(file, reader.fieldnames or ())
                yield from map(_cells, reader)
        case ".parquet":
            try:
                import pyarrow.parquet
            except ImportError as error:
                raise ValueError(f"{file}: Parquet needs `pip install pyarrow`; or write a CSV file") from error
            table = pyarrow.parquet.ParquetFile(file)
            _check_columns(file, table.schema_arrow.names)
            for batch in table.iter_batches():
                yield from map(_cells, batch.to_pylist())
        case other:
            raise ValueError(f"{file} ends in {other!r}: give a .csv or a .parquet file")


def _check_columns(file: Path, names: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in COLUMNS]:
        raise ValueError(f"{file} has the column {unknown[0]!r}; the columns are {', '.join(COLUMNS)}")


def _cells(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: cell
        for name, cell in row.items()
        if cell is not None and cell != "" and not (isinstance(cell, float) and math.isnan(cell))
    }


def _options(row: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `feedback` for a row. Raises `ValueError` for a cell that is not of its column's type."""
    options = dict(row)
    digest = hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()
    options.setdefault("key", f"row-{digest[:32]}")
    options.setdefault("source", "file")
    try:
        if "value" in row:
            options["value"] = float(row["value"])
        for name in {"scale", "ranking"} & row.keys():
            options[name] = json.loads(row[name]) if isinstance(row[name], str) else row[name]
    except ValueError as error:
        raise ValueError(f"a cell can't be read: {error}") from error
    if not options.keys() & {"trajectory", "answer", "ranking"}:
        raise ValueError("the row names no `trajectory`, `answer` or `ranking` that it is about")
    if "call" in options:
        if "answer" in options or "trajectory" not in options:
            raise ValueError("`call` needs `trajectory`, and no `answer`")
        call = options.pop("call")
        if isinstance(call, float):  # a column of numbers with empty cells
            if not call.is_integer():
                raise ValueError(f"`call` is {call}: write the number of a call, from 0")
            call = int(call)
        options["answer"] = int(call) if str(call).isdecimal() else call
    return options


async def _give_all(client: AsyncJourneywork, given: list[dict[str, Any]]) -> dict[str, Any]:
    """Give the feedback of all rows, several at once. Raises `GatewayUnavailableError`: then give the file again."""
    report: dict[str, Any] = {"given": 0, "repeated": 0, "refused": []}
    limiter = anyio.CapacityLimiter(_AT_ONCE)

    async def give(number: int, row: dict[str, Any]) -> None:
        async with limiter:
            try:
                answer = await client.feedback(**_options(row))
            except GatewayUnavailableError:
                raise
            except (JourneyworkError, TypeError, ValueError) as error:
                unauthorized = isinstance(error, JourneyworkError) and error.status == 401
                report["refused"].append({"row": number, "error": f"{error}{_KEY_ADVICE if unauthorized else ''}"})
            else:
                repeated = all(signal["repeated"] for signal in answer["signals"])
                report["repeated" if repeated else "given"] += 1

    with plain_errors(JourneyworkError):
        async with client, anyio.create_task_group() as tasks:
            for number, row in enumerate(given, 1):
                tasks.start_soon(give, number, row)
    report["refused"].sort(key=lambda refusal: refusal["row"])
    return report


if __name__ == "__main__":
    raise SystemExit(main())
