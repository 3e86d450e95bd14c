"""One contract for all storages of a lake: a local folder, and S3-compatible object storage."""

import errno
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from pipeline.config import Config, ConfigError, NatsConfig, StoreConfig
from pipeline.events import ExchangeRecorded
from pipeline.log.broker import Broker
from store.lake import columns
from store.lake.commits import create_table, write_rows
from store.lake.lake import Lake, lake_in, open_lake
from store.lake.maintenance import Maintenance
from store.lake.storage import LOG, DamagedFileError, LocalStorage, StoreError, open_storage, write_parquet
from store.lake.table import EventTable
from store.reading import rebuild, sql
from tests.store import kit

TAG = "rollout.exchange"


@pytest.fixture(params=["local", "s3"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    """Settings of a run whose store is a folder, or a prefix of a bucket."""
    where = request.getfixturevalue("object_store") if request.param == "s3" else {}
    return Config(run_dir=str(tmp_path / "run"), store=StoreConfig(**where))


@pytest.fixture
def lake(config: Config) -> Lake:
    return open_lake(config)


def rows(first: int, count: int = 5, at: int = 1_000, name: str = "t") -> pa.Table:
    seqs = list(range(first, first + count))
    return columns.table(TAG, [kit.exchange(name, s, at=1) for s in seqs], seqs, [at + s for s in seqs], [""] * count)


def test_where_nothing_was_written_nothing_is(config: Config) -> None:
    lake = open_lake(config)
    assert not lake.storage.exists()
    assert lake.names(TAG) == []
    assert lake.table(TAG).files().names == []
    with pytest.raises(StoreError, match=r"no store at"):
        sql.connect(config)
    with pytest.raises(FileNotFoundError):
        lake.storage.read(TAG, "none.parquet")
    lake.prepare()


def test_rows_come_back_as_they_were_appended(lake: Lake, config: Config) -> None:
    assert lake.table(TAG).append(rows(6)) == 5
    assert lake.table(TAG).append(rows(1)) == 5
    assert lake.storage.exists()
    assert kit.stored(open_lake(config), TAG) == list(range(1, 11))
    assert [t["log_seq"].to_pylist()[0] for t in kit.tables(lake, TAG)] == [1, 6]
    assert kit.tables(lake, TAG)[0].to_pylist() == rows(1).to_pylist()


@pytest.mark.slow
def test_a_file_of_many_megabytes_is_whole(lake: Lake) -> None:
    """On object storage that is an upload in parts."""
    noise = os.urandom(12 * 2**20).hex().encode()
    table = columns.table(TAG, [kit.exchange("t", 0, response=b'"' + noise + b'"')], [1], [1_000], [""])
    lake.table(TAG).append(table)
    assert kit.tables(lake, TAG)[0]["response"].equals(table["response"])


def test_what_fails_half_way_leaves_nothing(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(where: Any, tag: str, tables: Iterable[pa.Table]) -> None:
        write_parquet(where, tag, tables)
        raise OSError("the second half is missing")

    monkeypatch.setattr("store.lake.storage.write_parquet", half)
    with pytest.raises(OSError, match="second half"):
        lake.table(TAG).append(rows(1))
    assert kit.files_there(lake, TAG) == set()
    assert lake.names(TAG) == []


def test_an_event_is_its_sequence_and_its_time(lake: Lake, config: Config) -> None:
    for again in (lake, open_lake(config)):
        again.table(TAG).append(rows(1, 5))
        again.table(TAG).append(rows(3, 8))
    assert kit.stored(lake, TAG) == list(range(1, 11))
    # A log that lost its end gives the same sequences again, later.
    assert open_lake(config).table(TAG).append(rows(4, 7, at=2_000)) == 7
    assert lake.table(TAG).append(rows(4, 7, at=2_000)) == 0
    assert kit.stored(lake, TAG) == sorted([*range(1, 11), *range(4, 11)])
    # Data and position moved together.
    delta = lake.table(TAG).snapshot()
    assert delta is not None
    assert delta.transaction_version("store-rollouts/0") == 10


def test_a_writer_that_slept_is_refused_and_what_it_repeats_is_left_out(lake: Lake, config: Config) -> None:
    lake.table(TAG).append(rows(1))
    zombie = open_lake(config).table(TAG)
    late = rows(6)
    added = write_rows(zombie.storage, TAG, late)
    assert zombie.snapshot() is not None
    lake.table(TAG).append(rows(6))  # its events were delivered to another
    with pytest.raises(CommitFailedError):
        zombie.commit([added], 10)
    assert zombie.append(late) == 0
    assert kit.stored(lake, TAG) == list(range(1, 11))


def test_a_commit_whose_answer_was_lost_is_found(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.table(TAG).append(rows(1))
    real, lost = DeltaTable.create_write_transaction, [OSError("the answer is lost"), CommitFailedError("the same")]

    def commit(delta: DeltaTable, *args: object, **more: object) -> None:
        real(delta, *args, **more)  # type: ignore[arg-type]
        if lost:
            raise lost.pop()

    monkeypatch.setattr(DeltaTable, "create_write_transaction", commit)
    assert lake.table(TAG).append(rows(6)) == 5
    with pytest.raises(OSError, match="lost"):
        lake.table(TAG).append(rows(11))
    assert lake.table(TAG).append(rows(11)) == 0
    assert kit.stored(lake, TAG) == list(range(1, 16))


def test_one_of_many_writers_creates_a_table(tmp_path: Path) -> None:
    """The others are refused, and then find the first one's rows."""
    barrier = threading.Barrier(4)

    def creates(folder: Path) -> bool:
        storage = lake_in(folder).storage
        barrier.wait(60)
        try:
            create_table(storage, TAG, [], 0, StoreConfig())
        except CommitFailedError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        for attempt in range(8):
            assert sum(pool.map(creates, [tmp_path / str(attempt)] * 4)) == 1


def test_a_writer_that_loses_many_races_goes_on(lake: Lake, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal means that another writer's commit stands: it is no reason to give up."""
    monkeypatch.setattr("store.lake.table._MAX_REFUSALS", 3)
    faster, slower = open_lake(config).table(TAG), lake.table(TAG)
    others = [rows(6 + 5 * n) for n in range(5)]
    real = EventTable.commit

    def commit(table: EventTable, *args: Any) -> None:
        if table is slower and others:
            faster.append(others.pop())
        real(table, *args)

    monkeypatch.setattr(EventTable, "commit", commit)
    assert slower.append(rows(1)) == 5
    assert kit.stored(lake, TAG) == list(range(1, 31))


def test_a_damaged_file_is_named_and_removed_as_the_page_says(lake: Lake, config: Config) -> None:
    lake.table(TAG).append(rows(1))
    lake.table(TAG).append(rows(6))
    name = lake.names(TAG)[0]
    key = lake.storage.key(TAG, name)
    with lake.storage.files.open_input_file(key) as whole:
        half = whole.read(1_000)
    with lake.storage.files.open_output_stream(key) as stream:
        stream.write(half)
    for damage in (lambda: None, lambda: lake.storage.files.delete_file(key)):
        damage()
        for use in (lambda: sql.connect(config), lambda: open_lake(config).append(TAG, rows(1))):
            with pytest.raises(DamagedFileError, match=name):
                use()
    DeltaTable(lake.storage.uri(TAG), storage_options=lake.storage.options).repair()
    assert open_lake(config).append(TAG, rows(1)) == 5  # the log delivers them again
    assert kit.stored(open_lake(config), TAG) == list(range(1, 11))


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), PermissionError),
        (OSError(errno.EMFILE, "Too many open files"), OSError),
        (OSError(errno.EIO, "Input/output error"), DamagedFileError),
        (OSError("Couldn't deserialize thrift"), DamagedFileError),
        (pa.ArrowMemoryError("malloc failed"), pa.ArrowMemoryError),
    ],
)
def test_a_file_is_damaged_only_if_its_content_or_its_disk_is(
    error: Exception, raised: type[Exception], tmp_path: Path
) -> None:
    lake = lake_in(tmp_path)
    lake.table(TAG).append(rows(1))
    lake.storage.files = mock.Mock(open_input_file=mock.Mock(side_effect=error))
    with pytest.raises((OSError, MemoryError, DamagedFileError)) as told:
        lake.storage.read(TAG, lake.names(TAG)[0])
    assert type(told.value) is raised


def test_merging_and_sql_see_every_row_once(lake: Lake, config: Config) -> None:
    for first in range(1, 21, 5):
        lake.table(TAG).append(rows(first))
    Maintenance(lake, StoreConfig(compact_files=3, compact_grace_s=0.0)).once()
    (merged,) = lake.names(TAG)
    assert kit.files_there(lake, TAG) == {merged}
    with sql.connect(config) as connection:
        counted = connection.sql("SELECT count(*), min(stream_seq), max(stream_seq) FROM exchanges").fetchall()
        assert counted == [(20, 1, 20)]
        table = connection.sql("SELECT * FROM rollout_exchange ORDER BY log_seq").to_arrow_table()
    assert rebuild.events(ExchangeRecorded, table)[6].prompt_ids == kit.exchange("t", 7).prompt_ids
    # What is delivered again after the merge is found in the merged file.
    assert open_lake(config).table(TAG).append(rows(1, 25)) == 5


def test_duckdb_reads_without_extensions(lake: Lake, config: Config) -> None:
    lake.table(TAG).append(rows(1))
    with duckdb.connect() as connection:
        connection.execute("SET autoinstall_known_extensions = false; SET autoload_known_extensions = false")
        shown: dict[str, list[str]] = {}
        for count in (5, 10):
            sql.define_views(connection, open_lake(config), shown)
            assert connection.sql("SELECT count(*) FROM exchanges").fetchall() == [(count,)]
            lake.table(TAG).append(rows(count + 1))


def test_a_table_gets_the_columns_and_fields_of_a_newer_version(
    lake: Lake, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag, event = "group.scored", kit.scored("g", {"t": 1.0})
    today = columns.table(tag, [event], [1], [1], [""])
    older_member = pa.list_(pa.struct([("trajectory", pa.string()), ("reward", pa.float64())]))
    members = pa.array([[{"trajectory": "t", "reward": 1.0}]], older_member)
    place = today.schema.get_field_index("members")
    then = today.set_column(place, pa.field("members", older_member), members).drop_columns(["origin"])
    with monkeypatch.context() as patch:
        patch.setattr(columns, "arrow_schema", lambda _: then.schema)
        lake.table(tag).append(then)
    fresh = open_lake(config)
    fresh.prepare()
    fresh.table(tag).append(columns.table(tag, [event], [2], [2], [""]))
    Maintenance(fresh, StoreConfig(compact_files=2, compact_grace_s=0.0)).once()
    with sql.connect(config) as connection:
        asked = "SELECT origin, members[1].reward, members[1].split FROM group_scored ORDER BY log_seq"
        assert connection.sql(asked).fetchall() == [(None, 1.0, None), ("", 1.0, "train")]


def test_a_commit_that_a_power_cut_cut_is_set_aside(tmp_path: Path) -> None:
    """delta-rs links a commit into place and syncs nothing; what was acknowledged was synced by the store."""
    lake = lake_in(tmp_path)
    lake.table(TAG).append(rows(1))
    lake.table(TAG).append(rows(6))
    journal = tmp_path / TAG / LOG
    delta = lake.table(TAG).snapshot()
    assert delta is not None
    delta.create_checkpoint()
    (checkpoint,) = journal.glob("*.parquet")
    checkpoint.write_bytes(checkpoint.read_bytes()[:300])
    whole = (journal / f"{1:020d}.json").read_bytes()
    (journal / f"{2:020d}.json").write_bytes(whole[: len(whole) // 2])
    fresh = lake_in(tmp_path)
    fresh.prepare()
    assert kit.stored(fresh, TAG) == list(range(1, 11))
    fresh.table(TAG).append(rows(11))
    assert kit.stored(tmp_path, TAG) == list(range(1, 16))


def test_every_commit_is_synced_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = LocalStorage.make_durable

    def make_durable(storage: LocalStorage, tag: str, names: list[str]) -> None:
        synced.extend(names)
        real(storage, tag, names)

    monkeypatch.setattr(LocalStorage, "make_durable", make_durable)
    table = lake_in(tmp_path).table(TAG)
    table.append(rows(1))
    assert set(synced) == {f"{LOG}/{0:020d}.json", *table.files().names}
    other = lake_in(tmp_path).table(TAG)
    added = write_rows(other.storage, TAG, rows(6))
    assert other.snapshot() is not None
    other.commit([added], 10)
    synced.clear()
    table.append(rows(6))  # held by a commit of another process, which may have died before it synced
    assert synced == [added.path, f"{LOG}/{1:020d}.json"]


# -- the service ---------------------------------------------------------------------------------------------------


async def test_object_storage_that_is_away_is_waited_for(
    object_store: dict[str, str],
    running_store: kit.StoreProcess,
    nats_config: NatsConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("store.lake.writer._RETRY_S", 0.05)
    with kit.serving_s3() as url:
        # No bucket yet: writes are refused until it exists.
        async with (
            Broker.connect(nats_config) as broker,
            running_store(**object_store | {"s3_endpoint": url}) as config,
        ):
            await kit.publish(broker, [kit.exchange("t", seq) for seq in range(9)])
            await kit.until_waiting(caplog)
            assert await broker.lag("store-rollouts") == 9
            await anyio.to_thread.run_sync(kit.create_bucket, url)
            await kit.until_acked(broker)
        with sql.connect(config) as connection:
            assert connection.sql("SELECT count(*) FROM exchanges").fetchall() == [(9,)]


def test_a_bucket_has_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"store\.dir"):
        open_storage(Config(run_dir=str(tmp_path), store=StoreConfig(dir="s3://")))
