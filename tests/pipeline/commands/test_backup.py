"""`journeywork backup` and `restore`: another machine goes on with what the first one learned."""

import shutil
import stat
from pathlib import Path

import pytest

from pipeline.commands.backup import MANIFEST, backup
from pipeline.commands.restore import restore
from pipeline.config import Config, ConfigError, StoreConfig
from pipeline.running import folder_lock
from tests.conftest import VllmServer
from tests.kits.installation import JOURNEYWORK, ROOT, SMALL, Up, program, run_groups, up

GROUPS = 4
"""Groups of a step."""


def history(run: Up) -> set[tuple[str, int, int]]:
    """What the lake holds: event, stream sequence, stream time."""
    tags = ("rollout_exchange", "rollout_completed", "group_scored", "policy_checkpoint")
    return {
        (tag, row["log_seq"], row["at"])
        for tag in tags
        for row in run.query(f"SELECT log_seq, epoch_us(log_at) AS at FROM {tag}")
    }


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_restored_installation_trains_on(tmp_path: Path) -> None:
    settings = (
        *SMALL,
        "models.0.name=tictactoe",
        f"models.0.base={VllmServer.base}",
        "judge.group_size=2",
        "trainer.optimizer.learning_rate=2e-3",
    )
    first, second = tmp_path / "first" / "run", tmp_path / "second" / "run"
    finished: list[str] = []
    with up(tmp_path, first, "--run-dir", str(first), settings=settings) as run:
        run_groups(run.url, "before", GROUPS, finished)
        run.until_step(1)
        with pytest.raises(AssertionError, match="is in use: journeywork up "):
            program([*JOURNEYWORK, "backup", str(tmp_path / "early"), "--run-dir", str(first)], ROOT)
    before = history(run)
    program([*JOURNEYWORK, "backup", str(tmp_path / "copy"), "--run-dir", str(first)], ROOT)
    shutil.rmtree(first.parent)  # the first machine burns down
    said = program([*JOURNEYWORK, "restore", str(tmp_path / "copy"), "--run-dir", str(second)], ROOT)
    assert f"journeywork up --config FILE --run-dir {second}" in said
    with up(tmp_path, second, "--run-dir", str(second), settings=settings) as run:
        assert history(run) == before
        run.until_step(1)
        run_groups(run.url, "after", GROUPS, finished)
        run.until_step(2)
    assert run.process.returncode == 0
    assert before < history(run)
    rows = run.query("SELECT trajectory FROM trajectories WHERE completed_at IS NOT NULL")
    assert sorted(row["trajectory"] for row in rows) == sorted(finished)
    steps = run.query("SELECT step, parent FROM policy_checkpoint ORDER BY step")
    assert steps == [{"step": 1, "parent": "tictactoe@0"}, {"step": 2, "parent": "tictactoe@1"}]


@pytest.fixture
def stopped(tmp_path: Path) -> Config:
    """A run directory as `up` leaves it, in small."""
    run_dir = tmp_path / "run"
    for name in ("nats/jetstream/x.blk", "store/table/1.parquet", "keys/a.nk", "logs/x.log", "up.lock", "state.json"):
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text(name)
    return Config(run_dir=str(run_dir))


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


KEPT = {"nats/jetstream/x.blk", "store/table/1.parquet", "keys/a.nk"}


def test_logs_and_locks_stay_behind_and_only_the_owner_reads_a_copy(stopped: Config, tmp_path: Path) -> None:
    copied = backup(stopped, tmp_path / "copy")
    assert set(copied.files) == KEPT
    assert names(tmp_path / "copy") == {*KEPT, MANIFEST}
    (tmp_path / "new").mkdir()
    assert restore(tmp_path / "copy", tmp_path / "new") == copied
    assert names(tmp_path / "new") == KEPT
    for folder in (tmp_path / "copy", tmp_path / "new"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "keys" / "a.nk").stat().st_mode) == 0o600


def test_a_lake_elsewhere_comes_to_where_a_run_has_it(stopped: Config, tmp_path: Path) -> None:
    shutil.move(tmp_path / "run" / "store", tmp_path / "disk")
    elsewhere = Config(run_dir=stopped.run_dir, store=StoreConfig(dir=str(tmp_path / "disk")))
    backup(elsewhere, tmp_path / "copy")
    (tmp_path / "run" / "store").symlink_to(tmp_path / "disk")
    backup(stopped, tmp_path / "linked")
    for copy in ("copy", "linked"):
        assert set(restore(tmp_path / copy, tmp_path / f"{copy}-restored").files) == KEPT
        assert names(tmp_path / f"{copy}-restored") == KEPT


def test_what_is_no_whole_backup_is_refused_and_leaves_nothing(stopped: Config, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy", tmp_path / "other"
    backup(stopped, copy)

    def refused(why: str, run_dir: Path = other / "new") -> None:
        with pytest.raises(ConfigError, match=why):
            restore(copy, run_dir)

    with pytest.raises(ConfigError, match="not an empty folder"):
        backup(stopped, copy)
    refused("not an empty folder", Path(stopped.run_dir))
    manifest, changed = copy / MANIFEST, copy / "store" / "table" / "1.parquet"
    whole = manifest.read_text()
    # A name that is in the backup, and would be written beside the run.
    manifest.write_text(whole.replace("keys/a.nk", "../copy/keys/a.nk"))
    refused(r"a\.nk is not what was copied")
    manifest.write_text(whole)
    changed.write_text("store/table/2.parquet")
    refused(r"1\.parquet is not what was copied")
    changed.unlink()
    refused(r"1\.parquet is not what was copied")
    changed.symlink_to(Path(stopped.run_dir, "store", "table", "1.parquet"))
    refused(r"1\.parquet is not what was copied")
    manifest.write_text(whole.replace("store/table/1.parquet", "../run/up.lock"))
    refused(r"up\.lock is not what was copied")
    manifest.unlink()
    refused("no complete backup")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "copy", "other"}
    assert not any(other.iterdir())


def test_a_run_that_can_t_be_copied_is_refused(stopped: Config, tmp_path: Path) -> None:
    run_dir = Path(stopped.run_dir)
    with pytest.raises(ConfigError, match="inside of the run directory"):
        backup(stopped, run_dir / "copy")
    with folder_lock.lock_exclusively(run_dir), pytest.raises(folder_lock.InstallationInUseError):
        backup(stopped, tmp_path / "copy")
    (run_dir / "nats").rename(tmp_path / "nats")
    with pytest.raises(ConfigError, match="a NATS server of your own"):
        backup(stopped, tmp_path / "copy")
