"""One contract for all places for files: a local folder, and S3-compatible object storage."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import duckdb
import pyarrow as pa
import pytest

from pipeline.config import Config, ConfigError, NatsConfig, StoreConfig
from pipeline.events import ExchangeRecorded
from pipeline.log.broker import Broker
from store import columns, rebuild, sql
from store.catalog import Catalog, FileName, live
from store.compaction import Compactor
from store.local import LocalTarget
from store.location import open_target
from store.objects import ObjectTarget
from store.target import DamagedFileError, StoreBusyError, Target
from tests.store.kit import (
    StoreProcess,
    create_bucket,
    exchange,
    publish,
    run_of_one_step,
    serving_s3,
    until_acked,
)

TAG = "rollout.exchange"


@pytest.fixture(params=["local", "s3"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    """Settings of a run whose store is a folder, or a prefix of a bucket."""
    where = request.getfixturevalue("object_store") if request.param == "s3" else {}
    return Config(run_dir=str(tmp_path / "run"), store=StoreConfig(**where))


@pytest.fixture
def target(config: Config) -> Iterator[Target]:
    target = open_target(config)
    with target.locked():
        yield target


def rows(first: int, count: int, at: int = 1_000) -> pa.Table:
    seqs = list(range(first, first + count))
    return columns.table(
        TAG, [exchange("t", s, at=1) for s in seqs], seqs, [at + s for s in seqs], [""] * count
    )


def put(target: Target, first: int, count: int = 5, **metadata: str) -> str:
    name = str(FileName("ROLLOUTS", first, first + count - 1, 1_000 + first))
    target.write(TAG, name, [rows(first, count)], metadata)
    return name


def test_where_nothing_was_written_nothing_is(config: Config) -> None:
    target = open_target(config)
    assert not target.exists()
    assert target.names(TAG) == []
    with pytest.raises(sql.NoStoreError, match=r"no store at"):
        sql.connect(config)
    with pytest.raises(FileNotFoundError):
        target.read(TAG, "ROLLOUTS-000000000001-000000000001-1.parquet")
    target.remove(TAG, "ROLLOUTS-000000000001-000000000001-1.parquet")


def test_a_file_comes_back_as_it_was_written(target: Target) -> None:
    before = time.time()
    second, first = put(target, 6), put(target, 1, key="value")
    assert target.exists()
    assert target.names(TAG) == [first, second]
    assert target.read(TAG, first).to_pylist() == rows(1, 5).to_pylist()
    assert target.read(TAG, second, ["log_seq"])["log_seq"].to_pylist() == [6, 7, 8, 9, 10]
    assert target.metadata(TAG, first)["key"] == "value"
    assert target.column_names(TAG, first) == columns.arrow_schema(TAG).names
    assert target.newest(TAG, first) == 1_005
    assert target.size(TAG, first) > 1_000
    # Object storage says whole seconds.
    assert before - 1 <= target.modified(TAG, first) <= time.time() + 1
    target.check(TAG, first)


def test_a_file_of_many_megabytes_is_whole(target: Target) -> None:
    """On object storage that is an upload in parts."""
    noise = os.urandom(24 * 2**20).hex().encode()
    table = columns.table(TAG, [exchange("t", 0, response=b'"' + noise + b'"')], [1], [1_000], [""])
    name = str(FileName("ROLLOUTS", 1, 1, 1_000))
    target.write(TAG, name, [table], {})
    assert target.size(TAG, name) > 20 * 2**20
    assert target.read(TAG, name)["response"].equals(table["response"])


def test_what_fails_half_way_leaves_nothing(target: Target) -> None:
    def tables() -> Iterator[pa.Table]:
        yield rows(1, 5)
        raise RuntimeError("the second half is missing")

    with pytest.raises(RuntimeError, match="second half"):
        target.write(TAG, str(FileName("ROLLOUTS", 1, 9, 1)), tables(), {})
    assert target.names(TAG) == []


def test_removed_and_set_aside_files_are_listed_no_more(target: Target) -> None:
    first, second, third = put(target, 1), put(target, 6), put(target, 11)
    target.remove(TAG, first)
    target.remove(TAG, first)
    assert target.set_aside(TAG, second).endswith(".damaged")
    assert target.names(TAG) == [third]
    with pytest.raises(FileNotFoundError):
        target.metadata(TAG, first)


def test_a_damaged_file_is_named(target: Target, config: Config) -> None:
    name = put(target, 1)
    damage(target, name)
    fresh = open_target(config)
    for look in (fresh.check, fresh.read, fresh.metadata):
        with pytest.raises(DamagedFileError, match=name):
            look(TAG, name)
    catalog = Catalog(fresh)
    assert catalog.load() == [(TAG, FileName.parse(name))]
    assert fresh.names(TAG) == []


def damage(target: Target, name: str) -> None:
    """Replace the file by its first half."""
    if isinstance(target, LocalTarget):
        path = target.path(TAG, name)
        path.write_bytes(path.read_bytes()[:1_000])
        return
    assert isinstance(target, ObjectTarget)
    key = target._key(TAG, name)
    half = target._fs.open_input_file(key).read(1_000)
    with target._fs.open_output_stream(key) as stream:
        stream.write(half)


def test_a_second_writer_is_refused(target: Target, config: Config) -> None:
    with pytest.raises(StoreBusyError, match="another store process"), open_target(config).locked():
        pass


def test_compaction_and_sql_see_every_row_once(target: Target, config: Config) -> None:
    for first in range(1, 41, 5):
        put(target, first)
    compactor = Compactor(Catalog(target), StoreConfig(compact_files=3, compact_grace_s=0.0))
    compactor._merge(TAG)
    assert len(target.names(TAG)) == 9
    (merged,) = live(target, TAG)
    with sql.connect(config) as connection:
        counted = connection.sql(
            "SELECT count(*), min(stream_seq), max(stream_seq) FROM exchanges"
        ).fetchall()
        assert counted == [(40, 1, 40)]
    compactor.once()
    assert target.names(TAG) == [merged]
    assert open_target(config).read(TAG, merged)["log_seq"].to_pylist() == list(range(1, 41))
    with sql.connect(config) as connection:
        table = connection.sql("SELECT * FROM rollout_exchange ORDER BY log_seq").to_arrow_table()
    assert rebuild.events(ExchangeRecorded, table)[6].prompt_ids == exchange("t", 7).prompt_ids


def test_duckdb_reads_without_extensions(target: Target, config: Config) -> None:
    put(target, 1)
    connection = duckdb.connect()
    try:
        connection.execute("SET autoinstall_known_extensions = false; SET autoload_known_extensions = false")
        sql.refresh(connection, config)
        assert connection.sql("SELECT count(*) FROM exchanges").fetchall() == [(5,)]
        put(target, 6)
        sql.refresh(connection, config)
        assert connection.sql("SELECT count(*) FROM exchanges").fetchall() == [(10,)]
    finally:
        connection.close()


@pytest.mark.anyio
@pytest.mark.slow
async def test_a_store_writes_there_and_goes_on_after_a_stop(
    config: Config, running_store: StoreProcess, nats_config: NatsConfig
) -> None:
    settings = {name: getattr(config.store, name) for name in ("dir", "s3_endpoint", "s3_region")}
    async with Broker.connect(nats_config) as broker:
        for round_ in range(2):
            async with running_store(**settings) as running:
                await publish(broker, [exchange(f"u{round_}", seq) for seq in range(30)])
                if not round_:
                    await publish(broker, run_of_one_step())
                await until_acked(broker)
    with sql.connect(running) as connection:
        counted = connection.sql("SELECT count(*), count(DISTINCT stream_seq) FROM exchanges").fetchall()
        assert counted == [(64, 64)]
        assert connection.sql("SELECT count(*) FROM lineage").fetchall() == [(4,)]


@pytest.mark.anyio
async def test_object_storage_that_is_away_is_waited_for(
    object_store: dict[str, str],
    running_store: StoreProcess,
    nats_config: NatsConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("store.writer._RETRY_S", 0.05)
    with serving_s3() as url:
        # No bucket yet: writes are refused until it exists.
        async with (
            Broker.connect(nats_config) as broker,
            running_store(**object_store | {"s3_endpoint": url}) as config,
        ):
            await publish(broker, [exchange("t", seq) for seq in range(9)])
            with anyio.fail_after(30):
                while not any(r.getMessage() == "not written" for r in caplog.records):
                    await anyio.sleep(0.02)
            assert await broker.lag("store-rollouts") == 9
            await anyio.to_thread.run_sync(create_bucket, url)
            await until_acked(broker)
        with sql.connect(config) as connection:
            assert connection.sql("SELECT count(*) FROM exchanges").fetchall() == [(9,)]


def test_a_bucket_has_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"store\.dir"):
        open_target(Config(run_dir=str(tmp_path), store=StoreConfig(dir="s3://")))
