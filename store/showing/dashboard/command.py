"""`journeywork ui`: the dashboard of a run, also of one that runs no more.

journeywork ui                       the run under runs/ that runs, else the newest, at http://127.0.0.1:8701
journeywork ui --run-dir runs/demo --port 0
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import anyio

from pipeline.config import UiConfig
from pipeline.errors import leaves
from pipeline.running.installations import installation_settings
from pipeline.running.ports import free_port
from pipeline.running.service import until_signalled
from pipeline.telemetry import logs
from pipeline.terminal.parsers import command_parser
from store.reading.options import run_command
from store.showing.dashboard.server import SECTIONS
from store.showing.dashboard.service import ListenError, serve


def _port(text: str) -> int:
    """Return the port that an argument names. Raises `ArgumentTypeError`."""
    if not (text.isdecimal() and int(text) <= 65_535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 65535")
    return int(text)


def _ready(**facts: str | int | float) -> None:
    """Print where the dashboard is. `serve` calls it when it listens."""
    sys.stdout.write(f"the dashboard is at {facts['url']}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command until SIGINT or SIGTERM. Return 0, or an error's status (`run_command`): 1 where the address is
    taken or the store can't be read."""
    parser = command_parser("ui", "Web pages over the history of a run.")
    parser.add_argument("--run-dir", help="run to show; default: the one under runs/ that runs, else the newest")
    parser.add_argument(
        "--port",
        type=_port,
        help=f"port to listen on; default: {UiConfig().port}, or any free one if it is taken; 0: any",
    )
    logs.configure("ui", "WARNING")
    return run_command(parser, _run, argv, ListenError)


def _run(args: argparse.Namespace) -> int:
    """Answer until a signal ends it. Raises the first error of its tasks."""
    config = installation_settings(args.run_dir, sections=SECTIONS)
    port = free_port(config.ui.host, UiConfig().port) if args.port is None else args.port
    try:
        anyio.run(until_signalled, serve, config.replace(ui=config.ui.replace(port=port)), _ready)
    except ExceptionGroup as raised:
        raise leaves(raised)[0] from raised
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
