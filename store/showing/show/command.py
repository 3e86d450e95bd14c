"""What both commands do: look into the store, then ask the gateway, then print text or JSON."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

import duckdb

from pipeline.config import ConfigError
from pipeline.printing import visible, visible_json
from pipeline.running import gateway_api
from pipeline.running.gateway_api import GatewayError
from pipeline.running.runs import run_settings
from store.lake.storage import StoreError
from store.reading.errors import NotFoundError, ReadingError
from store.reading.history import History
from store.reading.texts import as_json, number, when

Data = dict[str, Any]

_NOT_YET = (
    "It is not in the store yet, where it appears some seconds after it was recorded. The gateway says:"
)
_PERHAPS_NONE = (
    "It was neither scored nor discarded. The same is said of a name that no group has: check the name."
)


@dataclass(frozen=True)
class Kind:
    """What a command shows."""

    name: str
    path: str
    """Of the gateway's route, without the id."""
    load: Callable[[History, argparse.Namespace], Data]
    """Reads the data; raises a `NotFoundError` where the store has none."""
    option: str
    """The command's own option, and its arguments of argparse."""
    option_arguments: dict[str, Any]


def main(kind: Kind, argv: Sequence[str]) -> int:
    """Run `journeywork <kind> show`. Returns 0; 1 where there is none or the store cannot be read; 2 for bad usage."""
    parser = argparse.ArgumentParser(prog=f"journeywork {kind.name}")
    command = parser.add_subparsers(required=True, metavar="COMMAND")
    arguments = command.add_parser("show", help=f"one {kind.name} as text")
    arguments.add_argument("id", help=f"id of the {kind.name}")
    arguments.add_argument("--json", action="store_true", help="the data as JSON")
    arguments.add_argument(kind.option, **kind.option_arguments)
    gateway_api.add_arguments(arguments)
    args = parser.parse_args(argv)
    try:
        config = run_settings(args.run_dir, sections=("store", "models"))
        with contextlib.closing(History(config)) as history:
            try:
                data, notes = kind.load(history, args), []
            except NotFoundError as error:
                data = _of_gateway(kind, args, error)
                notes = [_NOT_YET, *([_PERHAPS_NONE] if data.get("status") == "waiting" else [])]
    except (ConfigError, ReadingError, StoreError, duckdb.Error) as error:
        sys.stderr.write(visible(f"journeywork {kind.name} show: {error}\n"))
        return 2 if isinstance(error, ConfigError) else 1
    text = visible_json(as_json(data).decode()) if args.json else visible("\n".join([*notes, *outline(data)]))
    sys.stdout.write(f"{text}\n")
    return 0


def _of_gateway(kind: Kind, args: argparse.Namespace, missing: NotFoundError) -> Data:
    """What the gateway knows. Raises `missing` with the gateway's reason where it knows nothing."""
    try:
        return gateway_api.connect(args).ask("GET", kind.path + quote(args.id, safe=""))
    except (ConfigError, GatewayError) as error:
        raise NotFoundError(f"{missing} The gateway does not know it either: {error}") from error


def outline(data: Data) -> Iterator[str]:
    """Yield the lines of a dictionary: first its values of one line, then each longer one, indented below its name.
    Empty values are left out."""
    data = {_name(name): value for name, value in data.items() if value not in (None, "", {}, [])}
    lines = {name: value for name, value in data.items() if _is_line(value)}
    if lines:
        yield "  ".join(f"{name} {_line(value)}" for name, value in lines.items())
    for name, value in ((name, value) for name, value in data.items() if name not in lines):
        yield f"{name}:"
        for part in value if isinstance(value, list) else [value]:
            mark = "- " if isinstance(value, list) else "  "
            for line in outline(part) if isinstance(part, dict) else str(part).splitlines():
                yield mark + line
                mark = "  "


def _is_line(value: Any) -> bool:
    """Whether a value stands on one line: a short text, a list of such, or a dictionary of figures."""
    if isinstance(value, dict):
        return all(isinstance(part, int | float) for part in value.values())
    if isinstance(value, list):
        return not any(isinstance(part, dict) or "\n" in str(part) for part in value)
    return "\n" not in str(value)


def _name(name: str) -> str:
    return name.replace("\n", "\\n")


def _line(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{_name(name)}={_line(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_line, value))
    if isinstance(value, datetime):
        return when(value)
    return number(value) if isinstance(value, float) else str(value)
