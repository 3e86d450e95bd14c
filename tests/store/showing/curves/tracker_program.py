"""A program for `.venv-trackers`: sends points as the store service does, and reads them back with the library.

    python -m tests.store.showing.curves.tracker_program wandb FOLDER kill|send|read

`kill` starts and ends twice within a second if it can, then starts again, sends and kills itself. `send` sends all
again. `read` prints metric, step and value of each point of each run as JSON, after `send` has ended: a library may
write its last points as late as that.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config import Config
from store.showing.curves.rows import Row
from store.showing.curves.sending import Sender
from store.showing.curves.trackers import TRACKERS, Runs, Tracker, runs_of
from tests.store.showing.curves.kit import row

EVALUATION = Row(
    model="m", branch="main", step=1, version="m@1", at=2.5, log_seq=9, log_at=2_500_000, evaluation="e/0",
    metrics={"eval/held_out/reward": 0.75},
)  # fmt: skip


def rows_up_to(step: int) -> list[Row]:
    others = [row(1, model="n", at=1_100_000), row(1, branch="try", at=1_200_000)]
    steps = [row(number, at=number * 1_000_000) for number in range(1, step + 1)]
    return sorted(others + steps + [EVALUATION] * (step > 2), key=lambda one: one.log_at)


@contextlib.contextmanager
def sending(name: str, runs: Runs, rows: Iterable[Row]) -> Iterator[None]:
    """Send rows; go on once the library took them."""
    rows, taken = list(rows), threading.Semaphore(0)

    def make() -> Tracker:
        tracker = TRACKERS[name](runs)
        add = tracker.add

        def told(one: Row) -> None:
            add(one)
            taken.release()

        tracker.add = told  # type: ignore[method-assign]
        return tracker

    sender = Sender(name, make)
    sender.start(rows)
    for _ in rows:
        assert taken.acquire(timeout=120)
    yield
    sender.stop()
    sender.join(time.monotonic() + 120)


def wandb_points(runs: Runs) -> Iterator[tuple[str, str, int, Any]]:
    """Points of offline runs: a log in LevelDB's format after 7 bytes, of records in protobuf."""
    from wandb.proto import wandb_internal_pb2

    for file in sorted((runs.folder / "wandb").glob("offline-run-*/*.wandb")):
        data, at, record, name = file.read_bytes(), 7, b"", ""
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            length, kind = struct.unpack_from("<HB", data, at + 4)
            if kind == 0:  # the rest of a block that was never written
                break
            record, at = record + data[at + 7 : at + 7 + length], at + 7 + length
            if kind in (1, 4):  # whole, or the last part
                message = wandb_internal_pb2.Record.FromString(record)
                record = b""
                name = message.run.display_name or name
                items = {
                    (item.key or "/".join(item.nested_key)): json.loads(item.value_json)
                    for item in message.history.item
                }
                step = items.get("eval/step", message.history.step.num)
                for metric, value in items.items():
                    if not metric.startswith("_") and metric != "eval/step":
                        yield name, metric, step, value


def main() -> None:
    name, folder, action = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    runs = runs_of(Config(project="p", run_dir=str(folder)), folder)
    send = partial(sending, name, runs)
    if action == "kill":
        for step in (1, 2):
            with send(rows_up_to(step)):
                pass
        with send(rows_up_to(4)):
            os.kill(os.getpid(), signal.SIGKILL)
    if action == "send":
        with send(rows_up_to(5)):
            pass
        return
    found: dict[str, list[list[Any]]] = {}
    for run, metric, step, value in wandb_points(runs):
        found.setdefault(run, []).append([metric, step, value])
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
