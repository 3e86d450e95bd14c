"""The task of the store service that writes curves: it follows the checkpoints of the log, and writes into `curves/` of
the run folder.

The store service does this because it runs in every installation and owns what is kept of a run. It reads the log, not
its Parquet files, so a point is there as soon as its checkpoint is.
"""

from __future__ import annotations

from contextlib import aclosing

import anyio
import anyio.to_thread

from pipeline.config import Config
from pipeline.events import CheckpointPublished
from pipeline.log.broker import Broker
from pipeline.log.follow import follow_events
from store.curves.history import History
from store.curves.rows import Row, make_row
from store.curves.tensorboard import TensorBoard

FOLDER = "curves"


class Curves:
    """The curves of one run."""

    def __init__(self, config: Config, broker: Broker) -> None:
        self._config, self._broker = config, broker
        self._board: TensorBoard | None = None

    async def run(self) -> None:
        """Write until cancelled. Raises `OSError` if the folder can't be written."""
        history = await anyio.to_thread.run_sync(self._open)
        newest = history.newest
        events = follow_events(
            self._broker, [CheckpointPublished], lambda: 1, newest.place if newest else None,
            project=self._config.project,
        )  # fmt: skip
        try:
            async with aclosing(events):
                async for recorded in events:
                    row = make_row(recorded)
                    # A thread can't be stopped: a cancellation waits for it.
                    with anyio.CancelScope(shield=True):
                        await anyio.to_thread.run_sync(self._write, history, row)
        finally:
            if self._board:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(self._board.close)

    def _write(self, history: History, row: Row) -> None:
        added = history.add(row)
        if self._board and added == "new":
            self._board.add(row)
        elif self._board and added == "replaced":
            self._board.rebuild(history.rows.values())

    def _open(self) -> History:
        folder = self._config.path(FOLDER)
        history = History(folder)
        if self._config.curves.tensorboard:
            self._board = TensorBoard(folder / "tensorboard")
            self._board.rebuild(history.rows.values())
        return history
