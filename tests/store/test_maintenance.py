"""Merging that readers do not notice, retention, and checkpoints."""

import os
import threading
import time
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError

from pipeline.config import StoreConfig
from store.erasure.in_lake import Rewriter
from store.erasure.plan import Plan
from store.lake import columns
from store.lake.commits import last_checkpoint
from store.lake.lake import Lake, lake_in
from store.lake.maintenance import Maintenance
from store.lake.storage import LOG, DamagedFileError
from store.lake.table import EventTable
from store.reading import sql
from tests.store.kit import exchange, files_there, opened, stored

TAG = "rollout.exchange"
QUICK, PATIENT = (StoreConfig(compact_files=3, compact_grace_s=grace_s) for grace_s in (0.0, 60.0))


def write_files(lake: Lake, files: int, rows: int = 5, start: int = 1, at: int = 1_000) -> None:
    for i in range(files):
        seqs = list(range(start + i * rows, start + (i + 1) * rows))
        events = [exchange(f"t{s}", 0) for s in seqs]
        lake.table(TAG).append(columns.table(TAG, events, seqs, [at + s for s in seqs], [""] * rows))


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return lake_in(tmp_path / "store")


def seqs(run_dir: Path) -> list[int]:
    with sql.connect(run_dir) as connection:
        return [r[0] for r in connection.sql("SELECT stream_seq FROM exchanges ORDER BY 1").fetchall()]


def test_merged_files_stay_for_those_who_listed_them(lake: Lake, tmp_path: Path) -> None:
    write_files(lake, 4)
    before = sql.connect(tmp_path)
    upkeep = Maintenance(lake, PATIENT)
    upkeep.once()
    assert (len(files_there(lake, TAG)), len(lake.names(TAG))) == (5, 1)
    assert before.sql("SELECT count(*) FROM exchanges").fetchall() == [(20,)]
    assert seqs(tmp_path) == list(range(1, 21))
    upkeep.once()
    assert len(files_there(lake, TAG)) == 5
    before.close()
    write_files(lake, 4, start=21)
    Maintenance(lake, QUICK).once()
    assert files_there(lake, TAG) == set(lake.names(TAG))
    assert seqs(tmp_path) == list(range(1, 41))


def test_a_file_that_no_commit_names_is_deleted_once_it_is_old(lake: Lake, tmp_path: Path) -> None:
    write_files(lake, 1)
    folder = Path(lake.storage.uri(TAG))
    for name in ("young.parquet", "old.parquet"):
        (folder / name).write_bytes(b"left by a dead process")
    then = time.time() - 3 * 86_400
    os.utime(folder / "old.parquet", (then, then))
    Maintenance(lake, QUICK).once()
    assert files_there(lake, TAG) == {*lake.names(TAG), "young.parquet"}


def test_a_reader_that_asks_all_the_time_never_sees_a_row_twice_or_not(lake: Lake, tmp_path: Path) -> None:
    write_files(lake, 12)
    counts: set[int] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            counts.add(len(seqs(tmp_path)))

    reader = threading.Thread(target=read)
    reader.start()
    config = StoreConfig(compact_files=2, compact_bytes=120_000, compact_grace_s=60.0)
    for _ in range(3):
        Maintenance(lake, config).once()
    done.set()
    reader.join()
    assert counts == {60}
    assert len(lake.names(TAG)) < 12


def test_large_files_are_left_alone(lake: Lake) -> None:
    write_files(lake, 5)
    Maintenance(lake, msgspec.structs.replace(QUICK, compact_bytes=100)).once()
    assert len(lake.names(TAG)) == 5


def test_what_is_too_old_is_let_go(lake: Lake, tmp_path: Path) -> None:
    now = int(time.time() * 1e6)
    write_files(lake, 2, start=1, at=now - 10 * 86_400_000_000)
    write_files(lake, 2, start=11, at=now)
    Maintenance(lake, StoreConfig(keep_days=5.0, compact_grace_s=0.0)).once()
    assert seqs(tmp_path) == list(range(11, 21))
    assert len(files_there(lake, TAG)) == 2


def test_a_checkpoint_shortens_the_journal_and_keeps_the_position(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.lake.maintenance._CHECKPOINT_EVERY", 4)
    monkeypatch.setattr("store.lake.commits._JOURNAL_KEPT", "interval 0 seconds")
    write_files(lake, 8)
    Maintenance(lake, StoreConfig()).once()
    assert last_checkpoint(lake.storage, TAG) >= 7
    assert len(list(Path(lake.storage.uri(TAG), LOG).glob("*.json"))) <= 2
    again = lake_in(tmp_path / "store")
    write_files(again, 9)  # the first eight come again
    assert stored(again, TAG) == list(range(1, 46))
    assert DeltaTable(lake.storage.uri(TAG)).transaction_version("store-rollouts/0") == 45
    write_files(lake, 9)  # the journal that this one knew is gone
    assert stored(lake, TAG) == list(range(1, 46))


def test_a_table_of_a_newer_version_is_not_merged(lake: Lake) -> None:
    write_files(lake, 4)
    newer = columns.arrow_schema(TAG).append(pa.field("later", pa.int64())).empty_table()
    write_deltalake(lake.storage.uri(TAG), newer, mode="append", schema_mode="merge")
    Maintenance(lake, QUICK).once()
    assert len(lake.names(TAG)) == 4
    write_files(lake, 1, start=21)
    assert stored(lake, TAG) == list(range(1, 26))


def test_an_erasure_during_which_another_process_merges_erases_all_and_doubles_nothing(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(lake, 4)
    merger = Maintenance(lake, PATIENT)

    def merge(point: str) -> None:
        # After the commit of the first replaced file, before the erasure reads the newest version.
        if point == "store.after_commit":
            monkeypatch.setattr("pipeline.crash.point", lambda _: None)
            merger.once()

    monkeypatch.setattr("store.erasure.in_lake._COMMITTED_S", 0.0)  # no other process has a file to commit
    monkeypatch.setattr("pipeline.crash.point", merge)
    Rewriter(lake, "p", Plan(erasure="e", digest="d", runs=["t1", "t11"])).erase()
    assert seqs(tmp_path) == [seq for seq in range(1, 21) if seq not in (1, 11)]


def test_a_table_with_a_damaged_file_is_not_merged_and_the_others_are(lake: Lake, tmp_path: Path) -> None:
    """Regression: the store ended, started and ended again, every 40 s. It goes on writing."""
    write_files(lake, 4)
    name = lake.names(TAG)[1]
    path = Path(lake.storage.key(TAG, name))
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\0" * (len(content) // 2) + content[4 + len(content) // 2 :])
    other = "rollout.opened"
    for seq in range(1, 5):
        lake.append(other, columns.table(other, [opened(f"t{seq}")], [seq], [seq], [""]))
    maintenance = Maintenance(lake, QUICK)
    maintenance.once()
    assert maintenance.damaged == {TAG: str(path)}
    assert (len(lake.names(TAG)), len(lake.names(other))) == (4, 1)
    write_files(lake, 1, start=21)
    path.write_bytes(content)
    maintenance.once()
    assert maintenance.damaged == {}
    assert seqs(tmp_path) == list(range(1, 26))


def test_an_erasure_that_lacks_a_file_of_the_table_fails(lake: Lake) -> None:
    write_files(lake, 2)
    missing = lake.storage.key(TAG, lake.names(TAG)[0])
    Path(missing).unlink()
    rewriter = Rewriter(lake, "p", Plan(erasure="e", digest="d", runs=["t1", "t6"]))
    for act in (rewriter.count, rewriter.erase):
        with pytest.raises(DamagedFileError, match=missing):
            act()


def test_of_two_merges_of_the_same_files_one_is_refused(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(lake, 4)
    first, second, late = EventTable(lake.storage, TAG), EventTable(lake.storage, TAG), Maintenance(lake, QUICK)
    due = late._files_to_merge(second, 1 << 20)
    write_files(lake, 1, start=21)  # new rows refuse no merge
    assert Maintenance(lake, QUICK)._merge(first)
    monkeypatch.setattr(late, "_files_to_merge", lambda *_: due)
    with pytest.raises(CommitFailedError):
        late._merge(second)
    assert seqs(tmp_path) == list(range(1, 26))
