"""Command lines of the SDK's commands (`journeywork eval`, `prompt` and `init`): the gateway that they play through,
types of arguments, and how an error ends a command. `pipeline.terminal.parsers` is the same for the services' commands,
which this package does not import."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from journeywork.client import AsyncJourneywork

INTERRUPTED = 130
"""Exit status after Ctrl-C, as of a shell."""


def command_parser(name: str, module_docs: str | None) -> argparse.ArgumentParser:
    """Return the parser of `journeywork <name>`. Its help shows the docstring of the command's module, without the
    first line."""
    return argparse.ArgumentParser(
        prog=f"journeywork {name}",
        description=inspect.cleandoc(module_docs or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def at_least_one(text: str) -> int:
    """Return the whole number of an argument, for argparse. Raises `ArgumentTypeError` if it is none, or below 1."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"it must be a whole number of at least 1, not {text!r}")
    return int(text)


def add_play_options(parser: argparse.ArgumentParser) -> None:
    """Add `--url` and `--run-dir`, which `client_of` reads, and `--json`, `--concurrency` and `--max-exceptions`."""
    add = parser.add_argument
    add("--url", default="", help="the gateway; default: $JOURNEYWORK_URL, else that of the installation")
    add("--run-dir", default="", help="the installation; default: the newest one under runs/ that was not stopped")
    add("--json", action="store_true", help="print one JSON object")
    add("--concurrency", type=at_least_one, default=64, help="attempts at once (default: 64)")
    add("--max-exceptions", type=float, default=0.1, help="count, or share below 1, of attempts that may raise")


def client_of(args: argparse.Namespace) -> AsyncJourneywork:
    """Return a client of the gateway that the arguments name, with the key in $JOURNEYWORK_API_KEY. Raises
    `ValueError`."""
    return AsyncJourneywork(gateway_of(args.url, args.run_dir), api_key=os.environ.get("JOURNEYWORK_API_KEY", ""))


def gateway_of(url: str = "", run_dir: str = "") -> str:
    """Return the gateway's URL: `url`, else that of the installation in `run_dir`, else $JOURNEYWORK_URL, else that of
    the newest installation under `runs/` that was not stopped. Raises `ValueError`."""
    if given := url or ("" if run_dir else os.environ.get("JOURNEYWORK_URL", "")):
        return given
    states = [Path(run_dir) / "state.json"]
    if not run_dir:
        states = sorted(Path("runs").glob("*/state.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    problems: list[ValueError] = []
    for state in states:
        try:
            return _gateway_in(state)
        except ValueError as error:
            problems.append(error)
    if not problems:
        raise ValueError("no gateway is named: give --url or --run-dir, set JOURNEYWORK_URL, or start `journeywork up`")
    raise problems[0]


def _gateway_in(state: Path) -> str:
    """Return the gateway's URL in what a supervisor wrote about its installation (`pipeline.running.state`). Raises
    `ValueError` if the gateway was stopped, or if the file can't be read: it is another user's, or a power cut has
    emptied it."""
    try:
        content = dict(json.loads(state.read_text("utf-8")))
        url = str(content["urls"]["gateway"])
        service = content.get("services", {}).get("gateway", {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{state} names no gateway: {error}") from error
    if service.get("state") == "stopped":
        # Another installation may have its port now.
        raise ValueError(f"the installation {state.parent} is stopped: start it with `journeywork up`, or give --url")
    return url


@contextmanager
def output_of_one_object(as_json: bool) -> Iterator[None]:
    """If `as_json` (`--json`), what the block prints, and what programs that it starts print, goes to standard error:
    the command then writes one JSON object to standard output."""
    if not as_json:
        yield
        return
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(output, 1)
        os.close(output)


@contextmanager
def exit_status(unusable: tuple[type[Exception], ...], failed: tuple[type[Exception], ...]) -> Iterator[None]:
    """Run a command's work in the block. Turn errors into an exit with one line on standard error: status 2 for
    `unusable` arguments, 1 for `failed`, and 130 after Ctrl-C."""
    try:
        yield
    except (*unusable, *failed) as error:
        sys.stderr.write(f"journeywork: {error}\n")
        raise SystemExit(2 if isinstance(error, unusable) else 1) from error
    except KeyboardInterrupt:
        sys.stderr.write("journeywork: interrupted\n")
        raise SystemExit(INTERRUPTED) from None
