"""The overview of a run in the terminal: `journeywork watch`.

journeywork watch                       the run under runs/ that runs, else the newest, until Ctrl-C
journeywork watch --every 5 > watch.log without a terminal: one line every five seconds
journeywork watch --once                one line
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import signal
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import duckdb
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from pipeline.config import ConfigError
from pipeline.printing import visible, with_code
from pipeline.running.runs import run_settings
from pipeline.running.state import read_state
from pipeline.telemetry import logs as log
from store.lake.storage import StoreError
from store.reading.history import History
from store.reading.overview import models, numbers
from store.reading.texts import number

_EVERY_S, _PLAIN_EVERY_S = 2.0, 10.0
_PAUSE = 10
"""A view is followed by a pause of at least this many times its duration, which leaves the machine to the run."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_REWARDS = """
    SELECT coalesce(metrics['reward_mean_all'], metrics['reward_mean']) AS reward FROM checkpoints
    WHERE model = $model AND branch = 'main' AND reward IS NOT NULL ORDER BY step DESC LIMIT 60
"""


def lines(history: History) -> list[Text]:
    """Return what the dashboard's overview says, a line each: the state of the run, each model, what to do, alarms.

    Raises `StoreError`, `duckdb.Error`."""
    state = read_state(Path(history.config.run_dir))
    shown = [Text(f"{datetime.now(UTC):%H:%M:%S} UTC  {history.config.run_dir}", "bold")]
    for model in models(history) or [""]:
        data = numbers(history, {"model": model})
        counts, summary = data["counts"], data["summary"]
        _, gain, step = summary["sentences"]
        rewards = [row["reward"] for row in history.rows(_REWARDS, data)][::-1]
        shown += [
            Text(f"{model}: {step}"),
            Text(f"reward {number(rewards[-1])} {curve(rewards)}" if rewards else "no reward yet", "cyan"),
            Text(gain),
            Text(
                f"runs {counts['completed']:,} of {counts['opened']:,}, calls {counts['calls']:,}, groups scored "
                f"{counts['groups']:,}, discarded {counts['discarded']:,}, dead letters {counts['dead']:,}, "
                f"judge ${counts['judge_cost_usd'] or 0:.4g}"
            ),
        ]
    shown.insert(1, Text(summary["sentences"][0]))
    alarms = [f"{a['title']}{a['model'] and ' of '}{a['model']}: {a['detail']}" for a in summary["alarms"]]
    shown += [Text(f"ALARM {visible(text)}", "red") for text in (*(state.alarms if state else ()), *alarms)]
    shown.append(with_code(f"What to do: {summary['todo']}"))
    if state and state.running:
        shown += [Text(f"dashboard {url}") for url in [state.url("ui")] if url]
    return shown


def curve(values: Sequence[float]) -> str:
    """Return a block character for each value: the lowest block is the minimum, the highest the maximum."""
    low = min(values)
    span = (max(values) - low) or 1.0
    return "".join(_BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1))] for value in values)


def show(history: History, args: argparse.Namespace, console: Console) -> None:
    """Show the run until SIGINT or SIGTERM, with `--once` one time."""
    stopped = threading.Event()
    for ending in (signal.SIGINT, signal.SIGTERM):  # DuckDB would swallow a KeyboardInterrupt
        signal.signal(ending, lambda *_: stopped.set())
    live = console.is_terminal and not console.is_dumb_terminal and not args.once
    every_s = args.every or (_EVERY_S if live else _PLAIN_EVERY_S)
    view = Live(console=console, screen=True, auto_refresh=False) if live else contextlib.nullcontext()
    with view as screen:
        while not stopped.is_set():
            began = time.monotonic()
            shown = lines(history)
            if screen:
                screen.update(Group(*shown), refresh=True)
            else:
                sys.stdout.write(" | ".join(line.plain for line in shown) + "\n")
                sys.stdout.flush()
            if args.once:
                return
            stopped.wait(max(every_s, _PAUSE * (time.monotonic() - began)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command until SIGINT or SIGTERM. Returns 0; 1 where the store cannot be read; 2 for invalid usage."""
    parser = argparse.ArgumentParser(
        prog="journeywork watch",
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run-dir", help="default: the running one under runs/, else the newest")
    parser.add_argument(
        "--every", type=float, help="seconds between two looks; default: 2, without a terminal 10"
    )
    parser.add_argument("--once", action="store_true", help="print one line and end")
    args = parser.parse_args(argv)
    log.configure("watch", "CRITICAL")  # its lines would go through the view
    try:
        if args.every is not None and args.every <= 0:
            raise ConfigError("--every: give seconds above 0")
        with contextlib.closing(History(run_settings(args.run_dir, sections=("store", "models")))) as history:
            show(history, args, Console(highlight=False))
    except (ConfigError, StoreError, duckdb.Error) as error:
        sys.stderr.write(f"journeywork watch: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
