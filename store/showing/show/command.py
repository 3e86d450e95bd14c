"""What both commands do: look into the store, then ask the gateway, then print text or JSON."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

import duckdb

from pipeline.config import ConfigError
from pipeline.printing import visible
from pipeline.running import gateway_api
from pipeline.running.gateway_api import GatewayError
from pipeline.running.runs import run_settings
from store.lake.storage import StoreError
from store.reading.errors import NotFoundError, ReadingError
from store.reading.history import History
from store.reading.texts import as_json, number

Data = dict[str, Any]

_NOT_YET = (
    "It is not in the store yet, where it appears some seconds after it was recorded. The gateway says:"
)

_PERHAPS_NONE = (
    "It was neither scored nor discarded. The same is said of a name that no group has: check the name."
)


def run(
    what: str,
    argv: Sequence[str] | None,
    load: Callable[[History, argparse.Namespace], Data],
    text: Callable[[Data, argparse.Namespace], str],
    extend: Callable[[argparse.ArgumentParser], None],
) -> int:
    """Run `journeywork <what> show`. Returns 0; 1 where there is none or the store cannot be read; 2 for bad usage.

    `load` reads the data and raises a `NotFoundError` where the store has none; `text` makes it readable."""
    args = _parser(what, extend).parse_args(argv)
    try:
        config = run_settings(args.run_dir, sections=("store", "models"))
        with contextlib.closing(History(config)) as history:
            try:
                data, shown = (found := load(history, args)), text(found, args)
            except NotFoundError as error:
                data = _of_gateway(what, args, error)
                shown = "\n".join([_NOT_YET, *(f"  {name}: {value}" for name, value in data.items())])
                if what == "group" and data.get("status") == "waiting":
                    shown += f"\n{_PERHAPS_NONE}"
    except ConfigError as error:
        sys.stderr.write(f"journeywork {what} show: {error}\n")
        return 2
    except (ReadingError, StoreError, duckdb.Error) as error:
        sys.stderr.write(visible(f"journeywork {what} show: {error}\n"))
        return 1
    sys.stdout.write((as_json(data).decode() if args.json else visible(shown)) + "\n")
    return 0


def _parser(what: str, extend: Callable[[argparse.ArgumentParser], None]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"journeywork {what}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help=f"one {what} as text")
    show.add_argument("id", help=f"id of the {what}")
    show.add_argument("--json", action="store_true", help="the data as JSON")
    gateway_api.add_arguments(show)
    extend(show)
    return parser


def _of_gateway(what: str, args: argparse.Namespace, missing: NotFoundError) -> Data:
    """What the gateway knows. Raises `missing` with the gateway's reason where it knows nothing."""
    kind = {"trajectory": "trajectories", "group": "groups"}[what]
    try:
        return gateway_api.connect(args).ask("GET", f"/v1/{kind}/{quote(args.id, safe='')}")
    except (ConfigError, GatewayError) as error:
        raise NotFoundError(f"{missing} The gateway does not know it either: {error}") from error


# -- text ----------------------------------------------------------------------------------------------------------


def fields(*pairs: tuple[str, Any]) -> str:
    """Names with their values on one line; those without a value are left out."""
    return "  ".join(f"{name} {_value(value)}" for name, value in pairs if value not in (None, "", {}, []))


def _value(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}={_value(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def indented(text: str, by: str = "    ") -> str:
    """Every line of `text` after some spaces."""
    return "\n".join(by + line for line in text.splitlines())


def verdict(row: Data) -> str:
    """A judge's score of one run, with its words."""
    said = f": {row['explanation']}" if row["explanation"] else ""
    rubric = f" ({row['rubric']})" if row["rubric"] else ""
    return f"{row['judge_model']}{rubric} {number(row['score'])}{said}"
