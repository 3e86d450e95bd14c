"""Command lines of the SDK's commands (`journeywork eval`, `prompt` and `init`): the gateway that they play through,
types of arguments, and how an error ends a command. `pipeline.terminal.parsers` is the same for the services' commands,
which this package does not import."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

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
    """Return a whole number from 1 for argparse."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"it must be a whole number of at least 1, not {text!r}")
    return int(text)


def not_negative(text: str) -> float:
    """Return a number from 0 for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"it must be a number of at least 0, not {text!r}")
    return number


def add_gateway(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that plays through a gateway: `gateway_of` and `client_of` read them."""
    add = parser.add_argument
    add("--url", default="", help="the gateway; default: $JOURNEYWORK_URL, else that of the run")
    add("--run-dir", default="", help="the gateway's run; default: the running one under runs/, else the newest")
    add("--api-key-env", default="JOURNEYWORK_API_KEY", metavar="NAME", help="variable with the gateway's API key")
    add("--json", action="store_true", help="print one JSON object")
    add("--concurrency", type=at_least_one, default=64, help="attempts at once (default: 64)")
    add("--max-exceptions", type=not_negative, default=0.1, help="count, or share below 1, of attempts that may raise")


def gateway_of(args: argparse.Namespace) -> str:
    """Return the gateway's URL: the one given, else that of the run. Raises `ValueError`."""
    if url := str(args.url or ("" if args.run_dir else os.environ.get("JOURNEYWORK_URL", ""))):
        return url
    if args.run_dir:
        state = Path(args.run_dir) / "state.json"
    else:
        states = sorted(Path("runs").glob("*/state.json"), key=lambda path: path.stat().st_mtime)
        if not states:
            raise ValueError(
                "no gateway is named: give --url or --run-dir, set JOURNEYWORK_URL, or start `journeywork up`; "
                "`eval --no-record` needs none for models that no gateway serves"
            )
        state = next((path for path in reversed(states) if _is_running(path)), states[-1])
    try:
        content = _read_state(state)
        url = str(content["urls"]["gateway"])
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{state} names no gateway: {error}") from error
    if content.get("services", {}).get("gateway", {}).get("state") == "stopped":
        # Another run may have its port now.
        raise ValueError(f"the run {state.parent} is stopped: start it with `journeywork up`, or give --url")
    return url


def client_of(url: str, args: argparse.Namespace) -> AsyncJourneywork:
    """Return a client of the gateway with the key that the command names."""
    return AsyncJourneywork(url, api_key=os.environ.get(args.api_key_env, ""))


def _read_state(state: Path) -> dict[str, Any]:
    """Return what a supervisor wrote about its run (`pipeline.running.state`)."""
    return dict(json.loads(state.read_text("utf-8")))


def _is_running(state: Path) -> bool:
    """Whether the supervisor that wrote `state` runs on this machine (`process_start` of `pipeline.running.state`)."""
    try:
        content = _read_state(state)
        status = Path(f"/proc/{int(content['pid'])}/stat").read_text("utf-8", "replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
    except (OSError, ValueError, KeyError):
        return False
    return bool(content.get("since") == f"{boot} {status.rpartition(')')[2].split()[19]}")


@contextmanager
def output_of_one_object(wanted: bool) -> Iterator[None]:
    """With `--json`, send what rollouts and the programs that they start print to standard error, so that standard
    output is one JSON object."""
    if not wanted:
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
