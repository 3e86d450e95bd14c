"""The task of the store service that writes curves: it follows the checkpoints and evaluations of the log, and writes
into `curves/` of the run directory.

The store service does this because it runs in every installation and owns what is kept of a run. It reads the log, not
its Parquet files, so a point is there as soon as its checkpoint is.
"""

from __future__ import annotations

import time
from contextlib import aclosing
from functools import partial

import anyio
import anyio.to_thread

from pipeline.config import Config
from pipeline.events import CheckpointPublished, PolicyEvaluated
from pipeline.log.broker import Broker
from pipeline.log.follow import follow_events
from pipeline.log.messages import Place
from store.showing.curves.metrics_file import MetricsFile
from store.showing.curves.rows import make_row
from store.showing.curves.sending import CLOSING_S, Sender
from store.showing.curves.trackers import TRACKERS, runs_of

FOLDER = "curves"


class Curves:
    """The curves of one run."""

    def __init__(self, config: Config, broker: Broker) -> None:
        self._config, self._broker = config, broker
        self._senders: list[Sender] = []

    async def run(self) -> None:
        """Write a row for each event since the newest row of the file, and send it to the trackers, until cancelled.
        Then wait up to `CLOSING_S` for the trackers. Raises `OSError` if the folder can't be written, and
        `LogShrankError` if the log lost the event that was read last."""
        history = await anyio.to_thread.run_sync(self._open_file_and_senders)
        newest = history.newest
        followed: list[type[CheckpointPublished | PolicyEvaluated]] = [CheckpointPublished, PolicyEvaluated]
        # From the newest row's time, or from sequence 1. `add` drops an event that the file holds.
        events = follow_events(
            self._broker, followed, lambda: 1, Place(0, newest.log_at) if newest else None, project=self._config.project
        )
        try:
            async with aclosing(events):
                async for recorded in events:
                    row = make_row(recorded)
                    if row is None:
                        continue
                    # A thread can't be stopped: a cancellation waits for it.
                    with anyio.CancelScope(shield=True):
                        is_new = await anyio.to_thread.run_sync(history.add, row)
                    for sender in self._senders if is_new else ():
                        sender.add(row)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        for sender in self._senders:
            sender.stop()
        until = time.monotonic() + CLOSING_S
        for sender in self._senders:
            sender.join(until)

    def _open_file_and_senders(self) -> MetricsFile:
        """Read the file of the rows, and start a sender for each tracker, a thread that `_close` stops. Each gets the
        rows that the file holds. Waits for the disk."""
        folder = self._config.path(FOLDER)
        history = MetricsFile(folder)
        runs = runs_of(self._config, folder)
        for name in dict.fromkeys(self._config.curves.trackers):
            sender = Sender(name, partial(TRACKERS[name], runs))
            sender.start(history.rows.values())
            self._senders.append(sender)
        return history
