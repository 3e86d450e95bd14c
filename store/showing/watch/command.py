"""The live view of a run in the terminal: `journeywork watch`.

journeywork watch                       the run under runs/ that runs, else the newest, until Ctrl-C
journeywork watch --every 5 > watch.log without a terminal: one line every five seconds
journeywork watch --once                one line
"""

from __future__ import annotations

import argparse
import inspect
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread
import duckdb
from rich.console import Console, Group
from rich.live import Live

from pipeline.config import Config, ConfigError, with_values
from pipeline.errors import BrokerError
from pipeline.log.broker import Broker
from pipeline.running.runs import run_settings
from pipeline.running.state import read_state
from pipeline.telemetry import logs as log
from store.lake.storage import StoreError
from store.reading.history import History
from store.showing.watch.snapshot import Snapshot, log_lag, take_snapshot
from store.showing.watch.view import lines, plain

SECTIONS = ("store", "models", "vllm", "nats")
_EVERY_S, _PLAIN_EVERY_S = 2.0, 10.0
_PAUSE = 10
_LOG_RETRY_S, _LOG_TIMEOUT_S = 2.0, 3.0


class Watch:
    """Takes snapshots."""

    def __init__(self, config: Config) -> None:
        """Raises as `History` does."""
        self._config, self._history = config, History(config)
        self._lag: dict[str, int] | None = None
        self.asked = anyio.Event()
        """Set when the log was asked for the first time."""

    async def snapshot(self) -> Snapshot:
        """The figures of now. Raises `StoreError`, `duckdb.Error`."""
        return await anyio.to_thread.run_sync(take_snapshot, self._history, self._lag)

    async def follow_lag(self, every_s: float) -> None:
        """Ask the log for the lag until cancelled; while it does not answer, there is none."""
        while True:
            try:
                await self._ask(every_s)
            except (BrokerError, ConfigError):
                self._lag = None  # the view says so
                self.asked.set()
            await anyio.sleep(_LOG_RETRY_S)

    async def _ask(self, every_s: float) -> None:
        # A restart of `up` may have given the log another address.
        state = read_state(Path(self._config.run_dir))
        url = state.url("nats") if state is not None else self._config.nats.url
        if not url:
            raise ConfigError("no log is known")
        patience = {"connect_timeout_s": _LOG_TIMEOUT_S, "publish_deadline_s": _LOG_TIMEOUT_S}
        nats = with_values(self._config.nats, {"url": url, **patience})
        async with Broker.connect(nats, name="status", provision=False) as broker:
            while True:
                self._lag = await log_lag(broker)
                self.asked.set()
                await anyio.sleep(every_s)

    def close(self) -> None:
        """Close the database."""
        self._history.close()


async def show(config: Config, args: argparse.Namespace, console: Console) -> None:
    """Show the run until SIGINT or SIGTERM."""
    live = console.is_terminal and not console.is_dumb_terminal and not args.once
    every_s = args.every or (_EVERY_S if live else _PLAIN_EVERY_S)
    watch = Watch(config)
    try:
        async with anyio.create_task_group() as tg:
            tg.start_soon(_stop_on_signal, tg.cancel_scope)
            tg.start_soon(watch.follow_lag, every_s)
            await watch.asked.wait()
            if not live:
                while True:
                    sys.stdout.write(plain(await watch.snapshot()) + "\n")
                    sys.stdout.flush()
                    if args.once:
                        break
                    await anyio.sleep(every_s)
                tg.cancel_scope.cancel()
                return
            with Live(console=console, screen=True, auto_refresh=False) as screen:
                while True:
                    began = anyio.current_time()
                    snapshot = await watch.snapshot()
                    screen.update(Group(*lines(snapshot, *console.size)), refresh=True)
                    # A long history is looked at less often, which leaves the machine to the run.
                    await anyio.sleep(max(every_s, _PAUSE * (anyio.current_time() - began)))
    finally:
        watch.close()


async def _stop_on_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()
            return


def _parser() -> argparse.ArgumentParser:
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
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0; 1 where the store cannot be read; 2 for invalid usage."""
    args = _parser().parse_args(argv)
    log.configure("watch", "CRITICAL")  # its lines would go through the view
    try:
        if args.every is not None and args.every <= 0:
            raise ConfigError("--every: give seconds above 0")
        anyio.run(show, run_settings(args.run_dir, sections=SECTIONS), args, Console(highlight=False))
    except* ConfigError as group:
        sys.stderr.write(f"journeywork watch: {_first(group)}\n")
        return_code = 2
    except* (StoreError, duckdb.Error) as group:
        sys.stderr.write(f"journeywork watch: {_first(group)}\n")
        return_code = 1
    else:
        return_code = 0
    return return_code


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    raise SystemExit(main())
