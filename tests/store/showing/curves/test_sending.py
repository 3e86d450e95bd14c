"""Rows on their way to a tracker: their order, restarts, kills, and a tracker that fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from pipeline.backoff import Backoff
from pipeline.config import Config, CurvesConfig, NatsConfig
from pipeline.log.broker import Broker
from store.showing.curves.rows import Row
from store.showing.curves.sending import Sender
from store.showing.curves.task import Curves
from store.showing.curves.trackers import TRACKERS
from tests.store.showing.curves.kit import checkpoint, row


class Fake:
    """A tracker that keeps the steps it takes, and fails while there are `failures`."""

    def __init__(self, failures: int = 0, closes: bool = True) -> None:
        self.steps: list[int] = []
        self.failures, self.opened, self.closed = failures, 0, 0
        self.closes = closes
        self.changed = threading.Condition()

    def open(self) -> Fake:
        self.opened += 1
        return self

    def add(self, row: Row) -> None:
        with self.changed:
            if self.failures:
                self.failures -= 1
                raise OSError("no network")
            self.steps.append(row.step)
            self.changed.notify_all()

    def close(self) -> None:
        self.closed += 1
        if not self.closes:
            raise OSError("no network")

    def wait_for(self, steps: list[int]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.steps == steps, timeout=60), self.steps


@contextmanager
def sending(fake: Fake, folder: Path, rows: list[Row]) -> Iterator[Sender]:
    sender = Sender("wandb", fake.open, folder, Backoff(0.001, 0.01))
    sender.start(rows)
    try:
        yield sender
    finally:
        sender.stop()
        sender.join(time.monotonic() + 60)


def sent(folder: Path) -> Any:
    return json.loads((folder / "wandb.json").read_text())


def test_after_a_restart_only_what_is_missing_is_sent(tmp_path: Path) -> None:
    first, second = Fake(), Fake()
    with sending(first, tmp_path, [row(1), row(2)]):
        first.wait_for([1, 2])
    trained_again = row(2, at=3)  # replaced the one that the log lost
    with sending(second, tmp_path, [row(1), trained_again, row(3, at=4)]):
        second.wait_for([2, 3])


def test_a_tracker_that_fails_gets_every_point_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = Fake(failures=3)
    with sending(fake, tmp_path, [row(1)]) as sender:
        sender.add(row(2))
        fake.wait_for([1, 2])
    assert fake.opened == 4  # opened again after each failure
    warnings = [record.getMessage() for record in caplog.records if "did not accept" in record.getMessage()]
    assert len(warnings) == 3
    assert "remove the tracker from curves.trackers" in warnings[0]


def test_what_a_tracker_never_took_is_not_noted_as_sent(tmp_path: Path) -> None:
    fake = Fake(failures=10**9)
    with sending(fake, tmp_path, [row(1)]) as sender:
        sender.add(row(2))
    assert not (tmp_path / "wandb.json").exists()
    after = Fake()
    with sending(after, tmp_path, [row(1), row(2)]):
        after.wait_for([1, 2])


def test_points_go_in_the_logs_order_and_count_as_sent_once_their_run_is_finished(tmp_path: Path) -> None:
    fake = Fake()
    with sending(fake, tmp_path, [row(2), row(1), row(3)]) as sender:
        sender.add(row(4))
        fake.wait_for([1, 2, 3, 4])
        assert not (tmp_path / "wandb.json").exists()  # a kill now sends all again
    assert (fake.opened, fake.closed) == (1, 1)
    assert sent(tmp_path) == {"at": 4}


@pytest.mark.parametrize("failures", [0, 1])
def test_points_of_runs_that_were_not_finished_are_sent_at_the_next_start(
    tmp_path: Path, failures: int
) -> None:
    fake = Fake(closes=False)
    with sending(fake, tmp_path, [row(1)]) as sender:
        fake.wait_for([1])
        fake.failures = failures
        sender.add(row(2))
        fake.wait_for([1, 2])
        fake.closes = bool(failures)
    assert not (tmp_path / "wandb.json").exists()


def test_an_unreadable_file_of_what_was_sent_sends_all(tmp_path: Path) -> None:
    (tmp_path / "wandb.json").write_text("")
    fake = Fake()
    with sending(fake, tmp_path, [row(1)]):
        fake.wait_for([1])


def test_a_library_that_hangs_blocks_nobody(tmp_path: Path) -> None:
    inside, release = threading.Event(), threading.Event()

    class Hanging(Fake):
        def add(self, row: Row) -> None:
            inside.set()
            release.wait()

    sender = Sender("wandb", Hanging().open, tmp_path)
    sender.start([row(1)])
    assert inside.wait(60)
    sender.add(row(2))
    sender.stop()
    sender.join(time.monotonic())  # returns although the library has not
    release.set()
    sender.join(time.monotonic() + 60)


@pytest.mark.anyio
async def test_the_store_sends_what_it_writes(
    nats_config: NatsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake()
    monkeypatch.setitem(TRACKERS, "wandb", lambda runs: fake.open())
    config = Config(
        project="p", run_dir=str(tmp_path), nats=nats_config, curves=CurvesConfig(trackers=("wandb",))
    )
    for steps in ([1, 2], [1, 2, 3]):
        async with Broker.connect(nats_config) as broker, anyio.create_task_group() as tg:
            await broker.publish(checkpoint(steps[-1] - 1))
            await broker.publish(checkpoint(steps[-1]))
            tg.start_soon(Curves(config, broker).run)
            await anyio.to_thread.run_sync(partial(fake.wait_for, steps))
            tg.cancel_scope.cancel()
    assert (fake.opened, fake.closed) == (2, 2)
