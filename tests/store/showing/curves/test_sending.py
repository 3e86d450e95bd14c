"""Rows on their way to a tracker: their order, restarts, kills, and a tracker that fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from pipeline.concurrency.backoff import Backoff
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
def sending(fake: Fake, rows: list[Row]) -> Iterator[Sender]:
    sender = Sender("wandb", fake.open, Backoff(0.001, 0.01))
    sender.start(rows)
    try:
        yield sender
    finally:
        sender.stop()
        sender.join(time.monotonic() + 60)


def test_a_tracker_that_fails_gets_every_point_later(caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake(failures=3)
    with sending(fake, [row(1)]) as sender:
        sender.add(row(2))
        fake.wait_for([1, 2])
    assert fake.opened == 4  # opened again after each failure
    warnings = [record.getMessage() for record in caplog.records if "did not accept" in record.getMessage()]
    assert len(warnings) == 3
    assert "remove the tracker from curves.trackers" in warnings[0]


def test_a_library_that_hangs_blocks_nobody() -> None:
    inside, release = threading.Event(), threading.Event()

    class Hanging(Fake):
        def add(self, row: Row) -> None:
            inside.set()
            release.wait()

    sender = Sender("wandb", Hanging().open)
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
    config = Config(project="p", run_dir=str(tmp_path), nats=nats_config, curves=CurvesConfig(trackers=("wandb",)))
    for steps in ([1, 2], [1, 2, 1, 2, 3]):  # the second start sends all again; a real tracker leaves out what it holds
        async with Broker.connect(nats_config) as broker, anyio.create_task_group() as tg:
            await broker.publish(checkpoint(steps[-1] - 1))
            await broker.publish(checkpoint(steps[-1]))
            tg.start_soon(Curves(config, broker).run)
            await anyio.to_thread.run_sync(partial(fake.wait_for, steps))
            tg.cancel_scope.cancel()
    assert (fake.opened, fake.closed) == (2, 2)
