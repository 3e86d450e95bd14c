"""A disk that is full, a file cut short, a stream deleted under a running store: said clearly, and gone with its
cause."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest

from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from store.lake import lake_in
from store.storage import write_parquet
from tests.store.kit import StoreProcess, exchange, publish, store_all, stored, tables, until_acked

pytestmark = pytest.mark.anyio
TAG = "rollout.exchange"


def said(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """Fields of the log lines with this event."""
    return [r.fields for r in caplog.records if r.getMessage() == event]  # type: ignore[attr-defined]


async def until_said(caplog: pytest.LogCaptureFixture, event: str) -> dict[str, Any]:
    with anyio.fail_after(15):
        while not said(caplog, event):
            await anyio.sleep(0.02)
    return said(caplog, event)[0]


async def test_a_full_disk_is_said_and_what_waited_is_written_once_it_has_room(
    nats_config: NatsConfig,
    running_store: StoreProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("store.writer._RETRY_S", 0.05)

    def to_a_full_disk(_: str, tag: str, tables: Iterable[pa.Table]) -> None:
        write_parquet("/dev/full", tag, tables)

    monkeypatch.setattr("store.storage.write_parquet", to_a_full_disk)
    async with Broker.connect(nats_config) as broker:
        await publish(broker, [exchange("t", seq) for seq in range(20)])
        async with running_store():
            fields = await until_said(caplog, "events not written; trying again")
            assert str(tmp_path / "store") in fields["folder"]
            assert "20 events" in fields["detail"]
            assert await broker.lag("store-rollouts") == 20
            monkeypatch.setattr("store.storage.write_parquet", write_parquet)
            await until_acked(broker)
    assert stored(tmp_path / "store", TAG) == list(range(1, 21))


async def test_a_file_cut_short_is_set_aside_and_healed_from_the_log(
    nats_config: NatsConfig, running_store: StoreProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    body = b'"' + b"x" * 1_500_000 + b'"'
    async with Broker.connect(nats_config) as broker:
        await publish(broker, [exchange("t", seq) for seq in range(9)] + [exchange("t", 9, request=body)])
        await broker.js.publish("rollout.exchange.p.t", b"\xc1")
        await store_all(broker, running_store)
        lake = lake_in(tmp_path / "store")
        (name,) = lake.names(TAG)
        (before,) = tables(lake, TAG)
        path = Path(lake.storage.key(TAG, name))
        path.write_bytes(path.read_bytes()[:-100])
        await store_all(broker, running_store)
        assert stored(tmp_path / "store", TAG) == list(range(1, 11))
        (healed,) = tables(lake, TAG)
        assert healed.equals(before)
        assert name in said(caplog, "damaged file set aside")[0]["file"]
        assert (tmp_path / "store" / "damaged" / f"{TAG}-{name}").exists()


async def test_what_the_log_no_longer_holds_is_said_to_be_lost(
    nats_config: NatsConfig, running_store: StoreProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with Broker.connect(nats_config) as broker:
        await publish(broker, [exchange("t", seq) for seq in range(6)])
        await store_all(broker, running_store)
        await broker.js.purge_stream("ROLLOUTS", seq=4)
        (name,) = lake_in(tmp_path / "store").names(TAG)
        (tmp_path / "store" / TAG / name).write_bytes(b"PAR1")
        async with running_store():
            pass
    assert "4 to 6" in said(caplog, "a damaged file held events that the log no longer holds")[0]["detail"]
    assert stored(tmp_path / "store", TAG) == [4, 5, 6]


async def test_a_stream_deleted_under_a_running_store_is_made_anew_and_consumed(
    nats_config: NatsConfig, running_store: StoreProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Broker.connect(nats_config) as broker:
        await publish(broker, [exchange("old", seq) for seq in range(4)])
        async with running_store():
            await until_acked(broker)
            await broker.js.delete_stream("ROLLOUTS")
            await until_said(caplog, "the store's consumer was deleted")
            await publish(broker, [exchange("new", seq) for seq in range(4)])
            await until_acked(broker)
    assert sorted(stored(tmp_path / "store", TAG)) == [1, 1, 2, 2, 3, 3, 4, 4]


async def test_a_server_that_dies_and_comes_back_costs_nothing(
    nats_server: Any, nats_config: NatsConfig, running_store: StoreProcess, tmp_path: Path
) -> None:
    async with Broker.connect(nats_config) as broker, running_store():
        await publish(broker, [exchange("t", seq) for seq in range(5)])
        nats_server.kill()
        await anyio.to_thread.run_sync(nats_server.start)
        await publish(broker, [exchange("t", seq) for seq in range(5, 10)])
        with anyio.fail_after(30):
            while sorted(stored(tmp_path / "store", TAG)) != list(range(1, 11)):
                await anyio.sleep(0.05)
