"""A disk that is full, a stream deleted under a running store, a log that lost its end: said clearly, and gone with
its cause."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest

from pipeline import streams
from pipeline.config import NatsConfig, StoreConfig
from pipeline.events import ExchangeRecorded
from pipeline.log.broker import Broker, BrokerError
from pipeline.log.messages import Place
from store.lake.lake import lake_in
from store.lake.storage import write_parquet
from store.lake.writer import WriteBatch, Writer
from tests.store.kit import StoreProcess, exchange, publish, stored, until_acked, until_waiting

TAG = "rollout.exchange"


async def test_a_full_disk_is_said_and_what_waited_is_written_once_it_has_room(
    nats_config: NatsConfig,
    running_store: StoreProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("store.lake.writer._RETRY_S", 0.05)

    def to_a_full_disk(_: str, tag: str, tables: Iterable[pa.Table]) -> None:
        write_parquet("/dev/full", tag, tables)

    monkeypatch.setattr("store.lake.storage.write_parquet", to_a_full_disk)
    async with Broker.connect(nats_config) as broker:
        await publish(broker, [exchange("t", seq) for seq in range(20)])
        async with running_store(flush_rows=20, flush_s=60.0):  # all of them at once
            fields = await until_waiting(caplog)
            assert str(tmp_path / "store") in fields["folder"]
            assert "20 events" in fields["detail"]
            assert await broker.lag("store-rollouts") == 20
            monkeypatch.setattr("store.lake.storage.write_parquet", write_parquet)
            await until_acked(broker)
    assert stored(tmp_path / "store", TAG) == list(range(1, 21))


async def test_a_stream_deleted_under_a_running_store_ends_it_and_its_next_start_makes_it_anew(
    broker: Broker, running_store: StoreProcess, tmp_path: Path
) -> None:
    await publish(broker, [exchange("old", seq) for seq in range(4)])
    with pytest.RaisesGroup(pytest.RaisesExc(BrokerError, match="start the service again"), flatten_subgroups=True):
        async with running_store():
            await until_acked(broker)
            await broker.js.delete_stream("ROLLOUTS")
            await anyio.sleep_forever()
    async with running_store():
        await publish(broker, [exchange("new", seq) for seq in range(4)])
        await until_acked(broker)
    assert sorted(stored(tmp_path / "store", TAG)) == [1, 1, 2, 2, 3, 3, 4, 4]


async def test_nothing_is_acknowledged_on_a_log_that_lost_its_end(broker: Broker, tmp_path: Path) -> None:
    await publish(broker, [exchange("t", seq) for seq in range(2)])
    (first, _) = await broker.read(ExchangeRecorded, project="p", trajectory="t")
    writer = Writer(broker, lake_in(tmp_path), StoreConfig(), streams.consumer("store-rollouts"))
    at = first.place.at
    before_reconnect: dict[str, Any] = {"reconnects": broker.client.stats["reconnects"] - 1}
    await writer._require_whole_log(WriteBatch(messages={Place(1, at): first}, **before_reconnect))
    with pytest.raises(BrokerError, match="lost its end: message 9 of ROLLOUTS"):
        await writer._require_whole_log(WriteBatch(messages={Place(9, at): first}, **before_reconnect))
