"""`journeywork ui`: the dashboard of a run, also of one that runs no more.

journeywork ui                       the newest run under runs/, at http://127.0.0.1:8701
journeywork ui --run-dir runs/demo --port 0
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import anyio

from pipeline.arguments import whole_number
from pipeline.config import ConfigError, with_values
from pipeline.running.runs import run_settings
from pipeline.running.service import until_signalled
from pipeline.telemetry import logs as log
from store.showing.dashboard.errors import ListenError
from store.showing.dashboard.server import SECTIONS
from store.showing.dashboard.service import serve
from store.storage import StoreError

PORT = 8701


def _ready(**facts: str | int | float) -> None:
    sys.stdout.write(f"the dashboard is at {facts['url']}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command until SIGINT or SIGTERM. Returns 0; 1 where the address is taken or the store cannot be read; 2
    for bad settings."""
    parser = argparse.ArgumentParser(
        prog="journeywork ui", description="Web pages over the history of a run."
    )
    parser.add_argument(
        "--run-dir", help="run to show; default: the one under runs/ that was written to last"
    )
    parser.add_argument(
        "--host", help="address to listen on instead of ui.host; one that others reach needs keys"
    )
    parser.add_argument(
        "--port",
        type=whole_number(0, 65_535),
        default=PORT,
        help=f"port to listen on; default: {PORT}; 0: any",
    )
    parser.add_argument("--name", action="append", default=[], help="a further host name that is served")
    args = parser.parse_args(argv)
    log.configure("ui", "WARNING")
    try:
        config = run_settings(args.run_dir, sections=SECTIONS)
        values = {
            "ui.host": args.host or config.ui.host,
            "ui.port": args.port,
            "ui.hosts": (*config.ui.hosts, *args.name),
        }
        anyio.run(until_signalled, serve, with_values(config, values), _ready)
    except (ConfigError, ExceptionGroup) as raised:
        error: Exception = raised
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if not isinstance(error, ConfigError | StoreError | ListenError | OSError):
            raise
        sys.stderr.write(f"journeywork ui: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
