"""Compaction that readers do not notice, and retention."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest

from pipeline import crash
from pipeline.config import StoreConfig
from store import columns, sql
from store.catalog import Catalog, FileName, live
from store.compaction import Compactor
from store.local import LocalTarget
from tests.store.kit import exchange

TAG = "rollout.exchange"
QUICK = StoreConfig(compact_files=3, compact_grace_s=0.0)


def write_files(target: LocalTarget, files: int, rows: int = 5, start: int = 1, at: int = 1_000) -> None:
    for i in range(files):
        seqs = list(range(start + i * rows, start + (i + 1) * rows))
        events = [exchange(f"t{s}", 0) for s in seqs]
        table = columns.table(TAG, events, seqs, [at + s for s in seqs], [""] * rows)  # type: ignore[arg-type]
        target.write(TAG, str(FileName("ROLLOUTS", seqs[0], seqs[-1], at + seqs[0])), [table], {})


@pytest.fixture
def target(tmp_path: Path) -> LocalTarget:
    target = LocalTarget(tmp_path / "store")
    target.root.mkdir()
    return target


def seqs(run_dir: Path) -> list[int]:
    with sql.connect(run_dir) as connection:
        return [r[0] for r in connection.sql("SELECT stream_seq FROM exchanges ORDER BY 1").fetchall()]


def test_many_small_files_become_one_with_the_same_rows(target: LocalTarget, tmp_path: Path) -> None:
    write_files(target, 10)
    Compactor(Catalog(target), QUICK).once()
    assert len(target.names(TAG)) == 1
    assert seqs(tmp_path) == list(range(1, 51))


def test_replaced_files_stay_for_those_who_listed_them(target: LocalTarget, tmp_path: Path) -> None:
    write_files(target, 4)
    before = sql.connect(tmp_path)
    compactor = Compactor(Catalog(target), msgspec.structs.replace(QUICK, compact_grace_s=60.0))
    compactor.once()
    assert (len(target.names(TAG)), len(live(target, TAG))) == (5, 1)
    assert before.sql("SELECT count(*) FROM exchanges").fetchall() == [(20,)]
    assert seqs(tmp_path) == list(range(1, 21))
    (name,) = live(target, TAG)
    os.utime(target.path(TAG, name), (1, 1))
    compactor.once()
    assert target.names(TAG) == [name]
    before.close()


def test_compacting_what_was_compacted_keeps_every_row_once(target: LocalTarget, tmp_path: Path) -> None:
    slow = msgspec.structs.replace(QUICK, compact_grace_s=60.0)
    for generation in range(4):
        write_files(target, 3, start=1 + 15 * generation)
        Compactor(Catalog(target), slow).once()
    assert seqs(tmp_path) == list(range(1, 61))
    Compactor(Catalog(target), QUICK).once()
    assert seqs(tmp_path) == list(range(1, 61))
    catalog = Catalog(target)
    catalog.load()
    assert len(catalog.held("ROLLOUTS")) == 1


def test_a_reader_that_asks_all_the_time_never_sees_a_row_twice_or_not(
    target: LocalTarget, tmp_path: Path
) -> None:
    write_files(target, 30)
    counts: set[int] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            counts.add(len(seqs(tmp_path)))

    reader = threading.Thread(target=read)
    reader.start()
    config = StoreConfig(compact_files=2, compact_bytes=60_000, compact_grace_s=5.0)
    for _ in range(5):
        Compactor(Catalog(target), config).once()
    done.set()
    reader.join()
    assert counts == {150}


def test_every_point_of_a_round_may_be_the_last(
    target: LocalTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StopHereError(Exception):
        pass

    def stop_at(name: str) -> None:
        def point(here: str) -> None:
            if here == name:
                raise StopHereError

        monkeypatch.setattr(crash, "point", point)

    for name in ("store.before_rename", "store.after_rename", "store.compacted", "store.half_removed"):
        write_files(target, 4, start=1 if not target.names(TAG) else max(seqs(tmp_path)) + 1)
        before = seqs(tmp_path)
        stop_at(name)
        with pytest.raises(StopHereError):
            Compactor(Catalog(target), QUICK).once()
        assert seqs(tmp_path) == before, name
        monkeypatch.setattr(crash, "point", lambda _: None)
        Compactor(Catalog(target), QUICK).once()
        assert seqs(tmp_path) == before, name


def test_large_files_and_those_of_a_newer_version_are_left_alone(target: LocalTarget) -> None:
    write_files(target, 5)
    Compactor(Catalog(target), msgspec.structs.replace(QUICK, compact_bytes=100)).once()
    assert len(target.names(TAG)) == 5
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name in target.names(TAG):
        table = pq.read_table(target.path(TAG, name))
        pq.write_table(table.append_column("later", pa.nulls(5, pa.int64())), target.path(TAG, name))
    Compactor(Catalog(target), QUICK).once()
    assert len(target.names(TAG)) == 5


def test_what_is_too_old_is_let_go(target: LocalTarget, tmp_path: Path) -> None:
    import time

    now = int(time.time() * 1e6)
    write_files(target, 2, start=1, at=now - 10 * 86_400_000_000)
    write_files(target, 2, start=11, at=now)
    Compactor(Catalog(target), StoreConfig(keep_days=5.0)).once()
    assert seqs(tmp_path) == list(range(11, 21))
