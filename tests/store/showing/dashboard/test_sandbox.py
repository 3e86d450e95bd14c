"""The SQL box reads the history and nothing else, in bounded time and memory."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from pipeline.config import Config, StoreConfig, save
from pipeline.running.runs import SETTINGS, run_settings
from store.lake.lake import open_lake
from store.showing.dashboard import sandbox
from tests.store.kit import fill, run_of_one_step

REFUSED = (
    "FROM read_text('/etc/passwd')", "FROM read_csv('/etc/passwd')", "FROM '/etc/passwd.csv'",
    "FROM read_blob('/etc/*')", "FROM glob('/etc/*')", "FROM read_json('/proc/self/environ')",
    "FROM read_parquet('/tmp/x.parquet')",
    "FROM read_text('{run}/config.toml')", "FROM read_text('{run}/store/../config.toml')", "FROM glob('{run}/*')",
    "FROM read_csv('http://127.0.0.1:1/x.csv')", "FROM read_parquet('s3://bucket/x.parquet')",
    "COPY (SELECT 1) TO '{run}/store/x.csv'", "COPY groups TO '/tmp/x.parquet'", "EXPORT DATABASE '/tmp/x'",
    "ATTACH '/tmp/x.db'", "ATTACH ':memory:' AS other", "CREATE TABLE t AS SELECT 1", "CREATE TABLE t(i INT)",
    "CREATE VIEW groups AS SELECT 1", "INSERT INTO groups VALUES (1)", "DELETE FROM group_scored", "DROP VIEW groups",
    "UPDATE groups SET size = 0", "SET memory_limit = '8GB'", "SET enable_external_access = true", "RESET threads",
    "PRAGMA enable_profiling", "INSTALL httpfs", "LOAD httpfs", "CALL enable_logging()", "USE memory", "CHECKPOINT",
    "SELECT 1; SELECT 2", "", "no SQL", "SELECT * FROM nothing", "FROM sqlite_scan('/tmp/x.db', 't')", "VACUUM",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '/tmp/x.csv'", "PREPARE q AS SELECT 1", "EXECUTE q",
)  # fmt: skip


@pytest.mark.parametrize("query", REFUSED)
def test_what_is_no_question_to_the_history_is_refused(run_dir: Path, query: str) -> None:
    with pytest.raises((sandbox.SandboxError, duckdb.Error)):
        sandbox.answer(run_settings(run_dir), query.format(run=run_dir), 10.0)


def test_a_question_is_answered(run_dir: Path) -> None:
    result = sandbox.run(run_dir / SETTINGS, "SELECT trajectory, reward FROM rewards ORDER BY 1")
    assert (result.columns, result.rows, result.cut) == (
        ["trajectory", "reward"],
        [["t0", 1.0], ["t1", 0.0]],
        False,
    )
    many = sandbox.run(run_dir / SETTINGS, "SELECT repeat('x', 9000) FROM range(5000)")
    assert (len(many.rows), many.cut, len(many.rows[0][0])) == (sandbox.ROWS, True, 2000)
    odd = sandbox.run(
        run_dir / SETTINGS, "SELECT NULL, 'NaN'::DOUBLE, '\\xff'::BLOB, [1, 2], -'inf'::FLOAT"
    ).rows[0]
    assert odd == [None, "NaN", "ff", "[1, 2]", "-Infinity"]


def test_time_and_memory_are_bounded(run_dir: Path) -> None:
    with pytest.raises(sandbox.SandboxError, match="more than 1 s"):
        sandbox.run(run_dir / SETTINGS, "SELECT count(*) FROM range(1000000000000)", 1.0)
    with pytest.raises(sandbox.SandboxError, match="one statement"):
        sandbox.run(run_dir / SETTINGS, "")
    with pytest.raises(sandbox.SandboxError, match="Memory"):
        sandbox.run(run_dir / SETTINGS, "SELECT list(i) FROM range(1000000000) t(i)")


def test_a_history_in_object_storage_is_asked(
    tmp_path: Path, object_store: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(run_dir=str(tmp_path), store=StoreConfig(**object_store))  # type: ignore[arg-type]
    save(config, tmp_path / SETTINGS)
    fill(open_lake(config), run_of_one_step())
    result = sandbox.run(tmp_path / SETTINGS, "SELECT trajectory, reward FROM rewards ORDER BY 1")
    assert result.rows == [["t0", 1.0], ["t1", 0.0]]
    other = object_store["dir"].removeprefix("s3://").rpartition("/")[0]
    for query in (
        "FROM read_text('/etc/hostname')", "FROM read_csv('journeywork-s3:///etc/hostname')",
        f"FROM glob('journeywork-s3://{other}/*')", f"FROM read_text('journeywork-s3://{other}/secret')",
    ):  # fmt: skip
        with pytest.raises((sandbox.SandboxError, duckdb.Error)):
            sandbox.answer(config, query, 10.0)
