"""Rows on their way to a tracker: in a thread of its own, again after a failure, and from where they stopped after a
restart."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import SimpleQueue

import msgspec

from pipeline.backoff import Backoff
from pipeline.files import write_whole
from pipeline.telemetry.logs import get_logger
from store.showing.curves.rows import Row
from store.showing.curves.trackers import Tracker

log = get_logger("store.showing.curves.sending")

CLOSING_S = 10.0
"""Longest wait for the trackers when the service stops, in seconds."""


class Sender:
    """Sends rows to a tracker in a thread. `name`: of the tracker; `make` opens it. The thread is a daemon, so a
    library that hangs delays neither the curves nor the end of the process.

    `<name>.json` in `folder` holds the time in the log of the last row of an earlier start that the tracker has stored
    safely: its runs were finished. A kill therefore sends the rows since the start again. Waiting rows are shared with
    the history, which is in memory anyway, so a tracker that is down for long needs no further memory."""

    def __init__(
        self, name: str, make: Callable[[], Tracker], folder: Path, backoff: Backoff | None = None
    ) -> None:
        self._name, self._make, self._file = name, make, folder / f"{name}.json"
        self._backoff = backoff or Backoff(first_s=1.0, longest_s=300.0)
        self._waiting: SimpleQueue[Row | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"curves-{name}", daemon=True)

    def start(self, rows: Iterable[Row]) -> None:
        """Send those of `rows`, the history, that the tracker does not hold yet, and then what is added. Reads a
        file."""
        sent = self._sent()
        for row in sorted(rows, key=lambda row: row.log_at):
            if row.log_at > sent:
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
            log.warning("a tracker did not finish in time; it gets the rest after the next start",
                        tracker=self._name)  # fmt: skip

    def _run(self) -> None:
        tracker: Tracker | None = None
        newest: Row | None = None
        row, is_whole = self._waiting.get(), True
        while row and not self._stopping.is_set():
            try:
                tracker = tracker or self._make()
                tracker.add(row)
            except Exception as error:  # noqa: BLE001 - a library may raise anything; the curves continue
                log.warning(
                    "a tracker did not accept a point of the curves; trying again. Check the network, the login and "
                    "the library's environment variables, or remove the tracker from curves.trackers",
                    tracker=self._name, model=row.model, branch=row.branch, step=row.step, why=repr(error),
                )  # fmt: skip
                # The library's state after an error is unknown, so the runs are opened again.
                is_whole &= self._close(tracker)
                tracker = None
                self._stopping.wait(self._backoff.next_s())
            else:
                self._backoff.reset()
                newest, row = row, self._waiting.get()
        if self._close(tracker) and newest and is_whole:
            write_whole(self._file, msgspec.json.encode({"at": newest.log_at}), durable=True)

    def _sent(self) -> int:
        """Return the time in the log, in microseconds, of the last row that the tracker holds; -1 if there is none."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, int])["at"]
        except FileNotFoundError:
            return -1
        except (msgspec.DecodeError, KeyError) as error:
            log.warning("the file of what a tracker holds can't be read; all points are sent again",
                        file=str(self._file), why=repr(error))  # fmt: skip
            return -1

    def _close(self, tracker: Tracker | None) -> bool:
        """Finish the tracker's runs; then it holds every row that it took. Return whether that succeeded."""
        try:
            if tracker:
                tracker.close()
        except Exception as error:  # noqa: BLE001 - as in `_run`
            log.warning("a tracker did not finish its runs", tracker=self._name, why=repr(error))
            return False
        return True
