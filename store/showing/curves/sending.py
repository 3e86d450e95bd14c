"""Rows on their way to a tracker: in a thread of its own, and again after a failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from pipeline.concurrency.backoff import Backoff
from pipeline.telemetry.logs import get_logger
from store.showing.curves.rows import Row
from store.showing.curves.trackers import Tracker

logger = get_logger("store.showing.curves.sending")

CLOSING_S = 10.0
"""Longest wait for the trackers when the service stops, in seconds."""


class Sender:
    """Sends rows to a tracker in a thread. `name`: of the tracker; `make` opens it. The thread is a daemon, so a
    library that hangs delays neither the curves nor the end of the process.

    Each start sends the whole history; the tracker leaves out what it holds. Waiting rows are shared with the history,
    which is in memory anyway, so a tracker that is down for long needs no further memory."""

    def __init__(self, name: str, make: Callable[[], Tracker], backoff: Backoff | None = None) -> None:
        self._name, self._make = name, make
        self._backoff = backoff or Backoff(first_s=1.0, longest_s=300.0)
        self._waiting: SimpleQueue[Row | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"curves-{name}", daemon=True)

    def start(self, rows: Iterable[Row]) -> None:
        """Send `rows`, the history, in the order of the log, and then what is added."""
        for row in sorted(rows, key=lambda row: row.log_at):
            self._waiting.put(row)
        self._thread.start()

    def add(self, row: Row) -> None:
        """Send a new row, after those that wait. Does not block."""
        self._waiting.put(row)

    def stop(self) -> None:
        """Send no more rows, and finish the tracker's runs. Does not block: see `join`."""
        self._stopping.set()
        self._waiting.put(None)

    def join(self, until: float) -> None:
        """Wait for the thread's end, up to the time `until` of `time.monotonic`."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            logger.warning(
                "a tracker did not finish in time; it gets the rest after the next start", tracker=self._name
            )

    def _run(self) -> None:
        tracker: Tracker | None = None
        row = self._waiting.get()
        while row and not self._stopping.is_set():
            try:
                tracker = tracker or self._make()
                tracker.add(row)
            except Exception as error:  # noqa: BLE001 - a library may raise anything; the curves continue
                logger.warning(
                    "a tracker did not accept a point of the curves; trying again. Check the network, the login and "
                    "the library's environment variables, or remove the tracker from curves.trackers",
                    tracker=self._name,
                    model=row.model,
                    branch=row.branch,
                    step=row.step,
                    why=repr(error),
                )
                # The library's state after an error is unknown, so the runs are opened again.
                self._close(tracker)
                tracker = None
                self._stopping.wait(self._backoff.next_s())
            else:
                self._backoff.reset()
                row = self._waiting.get()
        self._close(tracker)

    def _close(self, tracker: Tracker | None) -> None:
        """Finish the tracker's runs; then it holds every row that it took."""
        try:
            if tracker:
                tracker.close()
        except Exception as error:  # noqa: BLE001 - as in `_run`
            logger.warning("a tracker did not finish its runs", tracker=self._name, why=repr(error))
